"""Stop strings in text that is written token by token."""

from collections.abc import Sequence
from typing import Any

_TOKENS_PER_CHARACTER = 4
"""A character of UTF-8 is at most four byte-level tokens."""
_INCOMPLETE = "\ufffd"
"""What a character decodes to of which tokens are missing."""


def tail_length(stops: Sequence[str]) -> int:
    """How many last tokens decide whether a stop string has just been completed."""
    return _TOKENS_PER_CHARACTER * (max(map(len, stops)) + 1)


def tokens_to_stop(
    tokenizer: Any, before: Sequence[int], new: Sequence[int], stops: Sequence[str]
) -> int | None:
    """How many tokens of ``new``, which follow those of ``before``, complete the first stop string
    that begins in ``before``; ``None`` where none does.

    Whoever writes ``new`` sees those that begin there.
    """
    if not stops or not before or not new:
        return None
    length = tail_length(stops)
    tail, head = list(before[-length:]), list(new[:length])
    text = _decode(tokenizer, tail)
    seam = len(text.rstrip(_INCOMPLETE))
    # The character behind the whole ones may have begun too.
    begun = seam + (len(text) > seam)

    def crosses(count: int) -> bool:
        text = _decode(tokenizer, tail + head[:count])
        # Neither one that ends at the seam, or before, nor one that begins behind it.
        spans = (range(max(0, seam - len(stop) + 1), begun) for stop in stops)
        pairs = zip(stops, spans, strict=True)
        return any(text.startswith(stop, start) for stop, span in pairs for start in span)

    if not crosses(len(head)):
        return None
    return next(count for count in range(1, len(head) + 1) if crosses(count))


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False)
