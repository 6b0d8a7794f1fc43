"""What the scheduler works on: a request, its sequences, and where they stand."""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from miles.backends.embedded.protocol import Failed, Refused, Sampling

_MASK = 2**64 - 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the ``n`` continuations. While it runs, its tokens are in ``Rows``."""

    request: "Request"
    index: int
    seed: int
    """uint64."""
    output_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    finish: dict[str, Any] | None = None
    """The protocol's ``finish_reason`` once it is finished."""
    weight_version: int = 0
    """Version of the weights that drew the last token."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.request.input_ids, *self.output_ids]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt and its ``n`` continuations."""

    rid: str
    input_ids: list[int]
    params: Sampling
    stop_token_ids: SequenceOf[int]
    """All tokens that stop it, the end-of-sequence tokens included."""
    deliver: Callable[["Request", Refused | Failed | None], None]
    """Called once, from the scheduler's thread: with ``None`` when every sequence is finished."""
    admission: tuple[str, int, int] | None = None
    sequences: list[Sequence] = field(default_factory=list[Sequence], init=False)
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, i, seed) for i, seed in enumerate(_seeds(self.params))]
        self.num_unfinished = len(self.sequences)

    @property
    def max_length(self) -> int:
        """Most tokens that a slot of this request can come to hold."""
        return len(self.input_ids) + self.params.max_new_tokens


def _seeds(params: Sampling) -> list[int]:
    if params.sampling_seeds is not None:
        return [seed & _MASK for seed in params.sampling_seeds]
    start = secrets.randbits(64) if params.sampling_seed is None else params.sampling_seed
    # An odd stride: the samples of a request have distinct seeds, the first one the given seed.
    return [(start + i * 0x9E3779B97F4A7C15) & _MASK for i in range(params.n)]
