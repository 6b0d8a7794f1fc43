"""The core attention on one or two context-parallel ranks."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

BOUNDS = (0, 4, 16, 24)
NUM_ROWS = 3
WINDOW = 3
SCALE = 0.3


class Case(NamedTuple):
    packed: bool
    windowed: bool


def tensors(case: Case) -> tuple[Tensor, ...]:
    """Query, key, value of all tokens, and what the loss multiplies the output with."""
    generator = torch.Generator().manual_seed(4)
    rows = () if case.packed else (NUM_ROWS,)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BOUNDS[-1], *rows, *shape, generator=generator)

    return draw(4, 8), draw(2, 8), draw(2, 8), draw(32)


def run_attention(case: Case) -> dict[str, Any]:
    """Output and gradients at this rank's tokens."""
    cp_size = int(os.environ["WORLD_SIZE"])
    with parallel(context_parallel_size=cp_size):
        return _run(case, cp_size)


def _run(case: Case, cp_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from miles.backends.megatron_utils.attention import CoreAttention, zigzag_indices

    config = make_config(
        context_parallel_size=cp_size, window_size=(WINDOW - 1, 0) if case.windowed else None
    )
    attention = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    bounds = torch.tensor(BOUNDS if case.packed else (0, BOUNDS[-1]), dtype=torch.int32)
    positions = zigzag_indices(bounds, cp_size, parallel_state.get_context_parallel_rank())
    *inputs, weights = (tensor[positions] for tensor in tensors(case))
    for tensor in inputs:
        tensor.requires_grad_()
    packed = None
    if case.packed:
        longest = int(bounds.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    output = attention(*inputs, None, packed_seq_params=packed)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return {
        "output": output.detach(),
        "positions": positions,
        **dict(zip("qkv", gradients, strict=True)),
    }
