"""The queue of prompts that wait for slots, and how many slots of what size there should be."""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from miles.backends.embedded.requests import Request, Sequence
from miles.backends.embedded.rows import Rows
from miles.backends.embedded.runner import PromptInput

MAX_PREFILL_TOKENS = 8192
"""Prompt tokens of one step (a longer prompt runs alone)."""
_SLOT_ROUNDING = 32


@dataclass(frozen=True)
class Limits:
    """What the engine takes on at once."""

    max_rows: int
    max_total_tokens: int
    """Slots times their capacity, over all running sequences."""
    context_length: int


@dataclass(frozen=True)
class _Job:
    """Sequences of one request that start from the same tokens and are prefilled together."""

    tokens: list[int]
    sequences: SequenceOf[Sequence]

    @property
    def request(self) -> Request:
        return self.sequences[0].request


class Waiting:
    """First come, first served: nothing overtakes, so equal arrivals make equal batches."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._jobs: deque[_Job] = deque()
        self.num_sequences = 0
        """May be read from any thread."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def push(self, request: Request) -> None:
        """Queue all sequences of a request, in as few prefills as the limits allow."""
        size = min(self._limits.max_rows, self._limits.max_total_tokens // request.max_length)
        for start in range(0, len(request.sequences), size):
            self._jobs.append(_Job(request.input_ids, request.sequences[start : start + size]))
        self.num_sequences += len(request.sequences)

    def push_front(self, sequences: SequenceOf[Sequence]) -> None:
        """Queue sequences that have run before, ahead of all others, each with its own tokens."""
        self._jobs.extendleft(_Job(s.tokens, [s]) for s in reversed(sequences))
        self.num_sequences += len(sequences)

    def remove(self, requests: set[Request]) -> None:
        self._jobs = deque(job for job in self._jobs if job.request not in requests)
        self.num_sequences = sum(len(job.sequences) for job in self._jobs)

    def admit(self, rows: Rows) -> list[PromptInput]:
        """Move jobs into rows, in order, as long as they fit; a job enters as a whole."""
        prompts: list[PromptInput] = []
        num_tokens = 0
        while self._jobs:
            job = self._jobs[0]
            num_tokens += len(job.tokens)
            if prompts and num_tokens > MAX_PREFILL_TOKENS:
                break
            num_rows = len(rows) + len(job.sequences)
            length = max(rows.max_length, job.request.max_length)
            if (
                num_rows > self._limits.max_rows
                or num_rows * length > self._limits.max_total_tokens
            ):
                break
            self._jobs.popleft()
            self.num_sequences -= len(job.sequences)
            prompts.append(PromptInput(job.tokens, len(rows), len(job.sequences)))
            rows.add(job.sequences, len(job.tokens))
        return prompts


def plan_slots(have: tuple[int, int], rows: Rows, length: int, limits: Limits) -> tuple[int, int]:
    """(slots, capacity) for these rows, the longest of which comes to hold ``length`` tokens.

    Grows in large steps, so that slabs are rarely copied, and only as sequences do: most end long
    before their token limit.
    """
    if len(rows) <= have[0] and length <= have[1]:
        return have
    slots = min(limits.max_rows, 1 << (len(rows) - 1).bit_length())
    capacity = have[1]
    if length > capacity:
        capacity = max(_rounded(length), min(capacity * 3 // 2, _rounded(rows.max_length)))
    for wanted in ((max(have[0], slots), capacity), (slots, capacity)):
        if wanted[0] * wanted[1] <= limits.max_total_tokens:
            return wanted
    # Fits: that is how rows were admitted.
    return len(rows), rows.max_length


def _rounded(length: int) -> int:
    return -(-length // _SLOT_ROUNDING) * _SLOT_ROUNDING
