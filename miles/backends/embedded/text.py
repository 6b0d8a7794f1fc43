"""Token ids to text, and the search for stop strings."""

from collections.abc import Sequence as SequenceOf
from typing import Any

from miles.backends.embedded.requests import Sequence


def find_stop_strings(
    tokenizer: Any, tails: SequenceOf[list[int]], stops: SequenceOf[tuple[str, ...]]
) -> list[str | None]:
    """The first of each row's stop strings in its decoded tail."""
    texts = tokenizer.batch_decode(list(tails), skip_special_tokens=False)
    return [
        next((stop for stop in row_stops if stop in text), None)
        for text, row_stops in zip(texts, stops, strict=True)
    ]


def response_texts(tokenizer: Any, sequences: SequenceOf[Sequence]) -> list[str]:
    """Text of finished sequences of one request.

    What stopped a sequence (stop token, or stop string and all behind it) is left out unless
    ``no_stop_trim``.
    """
    params = sequences[0].request.params
    matched = [
        None if params.no_stop_trim or s.finish is None else s.finish.get("matched")
        for s in sequences
    ]
    texts = tokenizer.batch_decode(
        [
            s.output_ids[:-1] if isinstance(match, int) else s.output_ids
            for s, match in zip(sequences, matched, strict=True)
        ],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return [
        text.partition(match)[0] if isinstance(match, str) else text
        for text, match in zip(texts, matched, strict=True)
    ]
