"""Memory of the language-model head: log-probs are computed for a few tokens at a time.

The passes of ``training_utils/logprobs.py`` and ``megatron_utils/vocab_parallel.py``, array by
array. Letters: ``n`` tokens of a chunk, ``v`` rows of the vocabulary on the rank, ``h`` hidden
size.
"""

from dataclasses import dataclass

from miles.backends.training_utils.logprobs import LOGITS_BUDGET

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Head:
    """One rank's part of the head in a training step."""

    tokens: int
    rows: int
    hidden_size: int
    compute_bytes: int
    chunk_size: int = -1
    """--log-probs-chunk-size."""
    entropy: bool = False
    """Entropies are computed."""
    entropy_gradient: bool = False

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        return self.chunk_size if self.chunk_size > 0 else max(1, LOGITS_BUDGET // self.rows)

    @property
    def is_chunked(self) -> bool:
        """Else the forward pass keeps what it has computed."""
        return self.tokens > self.chunk

    @property
    def wide(self) -> int:
        """fp32 ``[n, v]``."""
        return FP32 * min(self.tokens, self.chunk) * self.rows

    @property
    def narrow(self) -> int:
        """The same in the dtype that is computed in."""
        return self.wide * self.compute_bytes // FP32

    @property
    def cast(self) -> int:
        """What a cast to that dtype adds; in fp32 it makes no copy."""
        return 0 if self.compute_bytes == FP32 else self.narrow

    @property
    def weight_sum(self) -> int:
        """The weight's gradient, ``[v, h]`` in fp32."""
        return FP32 * self.rows * self.hidden_size

    @property
    def weight_part(self) -> int:
        """A chunk's part of it."""
        return self.compute_bytes * self.rows * self.hidden_size


def fused_head_bytes(head: Head) -> int:
    """``_FusedTokenStats`` of the FSDP backend: the most that its passes hold at a time."""
    wide, narrow, chunked = head.wide, head.narrow, head.is_chunked
    total, part = head.weight_sum, head.weight_part
    before = narrow + total if chunked else 0  # the chunk before this one has left these
    forward = 4 * wide if head.entropy else (3 if chunked else 2) * wide
    again = 2 * wide + before if chunked else wide
    gradient = (3 if head.entropy_gradient else 2) * wide + head.cast + before
    if head.compute_bytes == FP32 and not chunked:
        part = 0  # The only part is the sum.
    weight = wide + narrow + part + total
    return max(forward, again, gradient, weight)


def vocab_parallel_head_bytes(head: Head) -> int:
    """``_VocabParallelTokenStats`` of the Megatron backend."""
    wide, narrow = head.wide, head.narrow
    total, part = head.weight_sum, head.weight_part
    before = narrow if head.is_chunked else 0
    forward = 2 * wide + before
    gradient = 2 * wide + head.cast
    weight = wide + narrow + part
    return max(forward, gradient + total, weight + total)
