from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from miles.backends.megatron_utils.layers import RMSNorm
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils import layer_jobs

SIZE = 48
EPS = 1e-6


def config_of(dtype: torch.dtype, zero_centered: bool = False) -> Any:
    return SimpleNamespace(
        params_dtype=dtype,
        layernorm_zero_centered_gamma=zero_centered,
        use_cpu_initialization=True,
        sequence_parallel=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_gives_the_bits_of_transformers(dtype: torch.dtype, zero_centered: bool) -> None:
    torch.manual_seed(0)
    theirs = (Qwen3_5RMSNorm if zero_centered else Qwen3RMSNorm)(SIZE, eps=EPS).to(dtype)
    ours = RMSNorm(config=config_of(dtype, zero_centered), hidden_size=SIZE, eps=EPS)
    assert torch.equal(ours.weight, theirs.weight)
    with torch.no_grad():
        theirs.weight.add_(torch.randn(SIZE).to(dtype) / 4)
        ours.weight.copy_(theirs.weight)
    hidden = (3 * torch.randn(5, 2, SIZE)).to(dtype).requires_grad_()
    outputs = [norm(hidden) for norm in (ours, theirs)]
    gradients = [
        torch.autograd.grad(output.float().square().sum(), (hidden, norm.weight))
        for output, norm in zip(outputs, (ours, theirs), strict=True)
    ]
    assert outputs[0].dtype == dtype
    assert torch.equal(outputs[0], outputs[1])
    for mine, other in zip(*gradients, strict=True):
        assert torch.equal(mine, other)


def test_the_weight_is_marked_for_the_sum_over_sequence_parallel_ranks() -> None:
    assert RMSNorm(config=config_of(torch.float32), hidden_size=4).weight.sequence_parallel is True


@pytest.mark.parametrize("layout", ["tp2_sp", "tp2", "cp2", "cp2_packed", "cp2_recomputed_packed"])
def test_a_layer_on_two_ranks_equals_one_rank(megatron_ranks: Ranks, layout: str) -> None:
    """Output and the gradient of every norm, also those of queries and keys."""
    one = "one_packed" if layout.endswith("packed") else "one"
    whole = megatron_ranks.run_well(layer_jobs.run_layer, one, num_ranks=1)[0]
    first, second = megatron_ranks.run_well(layer_jobs.run_layer, layout, num_ranks=2)
    assert set(first["gradients"]) == set(whole["gradients"])
    assert len(whole["gradients"]) == 4
    for name, expected in whole["gradients"].items():
        assert expected.abs().max() > 1e-3, name
        for rank in (first, second):
            torch.testing.assert_close(rank["gradients"][name], expected, atol=1e-5, rtol=1e-5)
    output = torch.zeros_like(whole["output"])
    for rank in (first, second):
        output[rank["positions"]] = rank["output"]
    torch.testing.assert_close(output, whole["output"], atol=1e-5, rtol=1e-5)
