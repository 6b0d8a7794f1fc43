"""What the head's passes hold, held against the storages that live while they run on a CPU."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.backends.training_utils import logprobs
from miles.plan.logits import Head, fused_head_bytes, vocab_parallel_head_bytes

TOKENS, HIDDEN, ROWS = 96, 48, 2048


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or size == 0:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self._seen[address] = weakref.finalize(storage, self._free, address, size)

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.pop(key, None)


def peak_of(stats: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> int:
    """Of a forward and a backward pass over ``[TOKENS, HIDDEN]`` and ``[ROWS, HIDDEN]``."""
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    live = LiveBytes()
    with live:
        stats(hidden, weight).sum().backward()
    # The gradient of the hidden states is counted with the activations.
    return live.peak - hidden.numel() * hidden.element_size()


CASES = [
    (torch.bfloat16, 24, False),
    (torch.bfloat16, 96, False),
    (torch.bfloat16, 24, True),
    (torch.bfloat16, 96, True),
    (torch.float32, 24, False),
    (torch.float32, 96, False),
]


def head(dtype: torch.dtype, chunk: int, entropy: bool) -> Head:
    return Head(
        tokens=TOKENS,
        rows=ROWS,
        hidden_size=HIDDEN,
        compute_bytes=dtype.itemsize,
        chunk_size=chunk,
        entropy=entropy,
        entropy_gradient=entropy,
    )


@pytest.mark.parametrize(("dtype", "chunk", "entropy"), CASES)
def test_the_fused_head_holds_what_is_forecast(
    dtype: torch.dtype, chunk: int, entropy: bool
) -> None:
    def stats(hidden: Tensor, weight: Tensor) -> Tensor:
        found = logprobs.token_stats(
            hidden,
            weight,
            torch.arange(TOKENS),
            temperature=1.0,
            chunk_size=chunk,
            with_entropy=entropy,
        )
        return found.log_probs_R + (0 if found.entropy_R is None else found.entropy_R)

    forecast = fused_head_bytes(head(dtype, chunk, entropy))
    assert forecast == pytest.approx(peak_of(stats, dtype), rel=0.1)


@pytest.mark.megatron
@pytest.mark.parametrize(("dtype", "chunk", "entropy"), CASES)
def test_the_vocab_parallel_head_holds_what_is_forecast(
    dtype: torch.dtype, chunk: int, entropy: bool
) -> None:
    from miles.backends.megatron_utils.vocab_parallel import VocabShard, token_stats

    def stats(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs, entropies = token_stats(
            hidden,
            weight,
            torch.arange(TOKENS),
            VocabShard(0, ROWS, None),
            temperature=1.0,
            chunk_size=chunk,
            with_entropy=entropy,
        )
        return log_probs + (0 if entropies is None else entropies)

    forecast = vocab_parallel_head_bytes(head(dtype, chunk, entropy))
    assert forecast == pytest.approx(peak_of(stats, dtype), rel=0.1)
