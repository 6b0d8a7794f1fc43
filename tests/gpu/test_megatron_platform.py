"""Megatron's local modules on an accelerator without Transformer Engine."""

import math

import pytest
import torch
from torch import Tensor

from miles.backends.megatron_utils.attention import attend_share, rank_layout, zigzag_indices
from miles.backends.megatron_utils.fused_adam import FusedAdam
from miles.backends.training_utils.packed_attention import Documents, attend_documents
from miles.core import device
from tests.unit.backends.megatron_utils.attention_jobs import SCALE, WINDOW
from tests.unit.backends.megatron_utils.test_attention import plain_attention
from tests.unit.backends.megatron_utils.test_fused_adam import SETTINGS, made_params, train

pytestmark = pytest.mark.megatron

BOUNDS = (0, 16, 48, 128)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


def made_row() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    query = torch.randn(BOUNDS[-1], 4, 16)
    key, value = torch.randn(2, BOUNDS[-1], 2, 16)
    return query, key, value


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_packed_row_on_the_device_equals_the_formula(
    cp_size: int, window: int | None, dtype: torch.dtype
) -> None:
    expected = plain_attention(*made_row(), BOUNDS, window)
    query, key, value = (t.to(device.current_device(), dtype) for t in made_row())
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=query.device)
    found = torch.full_like(query, math.nan)
    if cp_size == 1:
        documents = Documents(bounds, 80)
        found = attend_documents(query, key, value, documents, scale=SCALE, sliding_window=window)
    else:
        order = torch.cat([zigzag_indices(bounds, cp_size, rank) for rank in range(cp_size)])
        for rank in range(cp_size):
            mine, layout = zigzag_indices(bounds, cp_size, rank), rank_layout(bounds, cp_size, rank)
            found[mine] = attend_share(query[mine], key[order], value[order], layout, SCALE, window)
    assert (found.float().cpu() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 1 << 17), (torch.float32, 1 << 16)])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_long_packed_row_costs_no_memory_that_grows_with_its_square(
    cp_size: int, dtype: torch.dtype, length: int, window: int | None
) -> None:
    where = device.current_device()
    bounds = torch.tensor([0, length], dtype=torch.int32, device=where)
    rows = [torch.randn(length, 2, 64, device=where, dtype=dtype) for _ in range(3)]
    mine = zigzag_indices(bounds, cp_size, 0)
    query, key, value = (tensor.requires_grad_() for tensor in rows)
    torch.accelerator.reset_peak_memory_stats()
    before = device.memory_stats().allocated_bytes
    if cp_size == 1:
        documents = Documents(bounds, length)
        out = attend_documents(query, key, value, documents, sliding_window=window)
    else:
        layout = rank_layout(bounds, cp_size, 0)
        out = attend_share(query[mine], key, value, layout, None, window)
    out.sum().backward()
    taken = device.memory_stats().peak_bytes - before
    assert taken < 32 * query.numel() * query.element_size() < length**2 // 2


def test_adam_on_the_device_equals_torch_on_the_host() -> None:
    theirs, ours = made_params(), made_params()
    train(torch.optim.AdamW(theirs, **SETTINGS), theirs, range(20), "grad")
    moved = [torch.nn.Parameter(p.detach().to(device.current_device())) for p in ours]
    optimizer = FusedAdam(moved, master_weights=True, use_decoupled_grad=True, **SETTINGS)
    train(optimizer, moved, range(20), "decoupled_grad")
    for mine, other in zip(moved, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), other, atol=1e-6, rtol=1e-6)
