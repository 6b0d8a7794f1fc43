"""The running sequences as arrays: row ``i`` is the sequence in slot ``i``.

Bookkeeping of a step is a few array operations over all rows; Python touches a sequence only when
it enters, finishes or is taken out.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from miles.backends.embedded.requests import Sequence
from miles.backends.embedded.sampling import SamplingRows

NO_TOKEN = -1


class Rows:
    """Dense table of at most ``max_rows`` sequences."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.sequences: list[Sequence] = []
        self.weight_version = 0
        """Of the weights that drew the last token of every row."""
        self._last_token = np.zeros(max_rows, np.int64)
        self._cached = np.zeros(max_rows, np.int64)
        self._generated = np.zeros(max_rows, np.int64)
        self._max_new = np.zeros(max_rows, np.int64)
        self._max_length = np.zeros(max_rows, np.int64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_p = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._seed = np.zeros(max_rows, np.uint64)
        self._has_stop_strings = np.zeros(max_rows, np.bool_)
        self._stop_ids = np.full((max_rows, 1), NO_TOKEN, np.int64)
        self._tokens = np.zeros((max_rows, 16), np.int64)
        self._log_probs = np.zeros((max_rows, 16), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def last_tokens(self) -> NDArray[np.int64]:
        """``[N]``: drawn, but not in the slots yet."""
        return self._last_token[: len(self)]

    @property
    def cached(self) -> NDArray[np.int64]:
        """``[N]``: tokens in the slots."""
        return self._cached[: len(self)]

    @property
    def longest_cached(self) -> int:
        return int(self.cached.max(initial=0))

    @property
    def max_length(self) -> int:
        """Most tokens that any slot will come to hold."""
        return int(self._max_length[: len(self)].max(initial=0))

    def sampling(self) -> SamplingRows:
        count = len(self)
        return SamplingRows(
            temperature=self._temperature[:count],
            top_p=self._top_p[:count],
            top_k=self._top_k[:count],
            seed=self._seed[:count],
            position=self._generated[:count],
        )

    def add(self, sequences: SequenceOf[Sequence], num_prompt_tokens: int) -> None:
        """Append sequences of one request that share a prefill of so many tokens."""
        first, last = len(self), len(self) + len(sequences)
        request = sequences[0].request
        params = request.params
        rows = slice(first, last)
        self._cached[rows] = num_prompt_tokens
        self._max_new[rows] = params.max_new_tokens
        self._max_length[rows] = request.max_length
        self._temperature[rows] = params.temperature
        self._top_p[rows] = params.top_p
        self._top_k[rows] = params.top_k
        self._has_stop_strings[rows] = bool(params.stop_strings)
        self._set_stop_ids(rows, request.stop_token_ids)
        for row, sequence in enumerate(sequences, start=first):
            done = len(sequence.output_ids)
            self._generated[row] = done
            self._seed[row] = sequence.seed
            if done:
                self._widen(done)
                self._tokens[row, :done] = sequence.output_ids
                self._log_probs[row, :done] = sequence.log_probs
        self.sequences.extend(sequences)

    def append(
        self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32], weight_version: int
    ) -> None:
        """Record one drawn token for every row."""
        count = len(self)
        generated = self._generated[:count]
        self._widen(int(generated.max()) + 1)
        self._tokens[np.arange(count), generated] = tokens
        self._log_probs[np.arange(count), generated] = log_probs
        self._last_token[:count] = tokens
        generated += 1
        self.weight_version = weight_version

    def count_cached(self, num_decoded: int) -> None:
        """The first rows have put their last token into their slots."""
        self._cached[:num_decoded] += 1

    def stopped(self) -> NDArray[np.bool_]:
        """``[N]``: the last token is a stop token."""
        return (self.last_tokens[:, None] == self._stop_ids[: len(self)]).any(1)

    def full(self) -> NDArray[np.bool_]:
        """``[N]``: the token limit is reached."""
        return self._generated[: len(self)] >= self._max_new[: len(self)]

    def with_stop_strings(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._has_stop_strings[: len(self)])

    def tail(self, row: int, num_tokens: int) -> list[int]:
        """The last tokens that the sequence has produced."""
        end = int(self._generated[row])
        return self._tokens[row, max(0, end - num_tokens) : end].tolist()

    def save(self, row: int) -> Sequence:
        """Write a row's tokens into its sequence and return it."""
        sequence = self.sequences[row]
        count = int(self._generated[row])
        sequence.output_ids = self._tokens[row, :count].tolist()
        sequence.log_probs = self._log_probs[row, :count].tolist()
        sequence.weight_version = self.weight_version
        return sequence

    def remove(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take rows out and close the holes with the last rows.

        Returns (source, target): the rows that moved, whose slots the caller copies.
        """
        count = len(self) - len(gone)
        target = gone[gone < count]
        source = np.setdiff1d(np.arange(count, len(self)), gone, assume_unique=True)
        for array in (
            *(self._last_token, self._cached, self._generated, self._max_new, self._max_length),
            *(self._temperature, self._top_p, self._top_k, self._seed),
            *(self._has_stop_strings, self._stop_ids, self._tokens, self._log_probs),
        ):
            array[target] = array[source]
        for hole, row in zip(target.tolist(), source.tolist(), strict=True):
            self.sequences[hole] = self.sequences[row]
        del self.sequences[count:]
        return source, target

    def _set_stop_ids(self, rows: slice, stop_ids: SequenceOf[int]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(
                self._stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN
            )
        self._stop_ids[rows] = NO_TOKEN
        self._stop_ids[rows, : len(stop_ids)] = stop_ids

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            extra = ((0, 0), (0, max(width, 2 * have) - have))
            self._tokens = np.pad(self._tokens, extra)
            self._log_probs = np.pad(self._log_probs, extra)
