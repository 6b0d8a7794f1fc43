"""``--moe-shared-expert-intermediate-size``: the layer against its formula in plain torch."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.moe_jobs import (
    LAYOUTS,
    NUM_CHOSEN,
    NUM_EXPERTS,
    full_weights,
    hidden,
    part_of,
    run_mixture,
)


def mlp(tokens: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """SwiGLU."""
    gate, up = (tokens @ weights[f"{name}.fc1"].T).chunk(2, dim=-1)
    return (silu(gate) * up) @ weights[f"{name}.fc2"].T


def mixture(tokens: Tensor, weights: Mapping[str, Tensor], *, gated: bool) -> Tensor:
    """The chosen experts, weighted by the softmax over their scores, plus the shared ones."""
    scores, chosen = (tokens @ weights["router"].T).topk(NUM_CHOSEN)
    shares = torch.zeros(len(tokens), NUM_EXPERTS).scatter(1, chosen, scores.softmax(-1))
    shared = mlp(tokens, weights, "shared")
    if gated:
        shared = shared * (tokens @ weights["shared.gate"].T).sigmoid()
    experts = [mlp(tokens, weights, f"expert{i}") for i in range(NUM_EXPERTS)]
    return shared + sum(shares[:, i : i + 1] * expert for i, expert in enumerate(experts))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_experts_are_added_to_the_chosen_ones_in_every_layout(
    megatron_ranks: Ranks, layout: str, gated: bool
) -> None:
    tokens, factors = hidden()
    weights = {n: w.requires_grad_() for n, w in full_weights().items() if gated or "gate" not in n}
    tokens.requires_grad_()
    output = mixture(tokens, weights, gated=gated)
    (output * factors).sum().backward()
    answers = megatron_ranks.run_well(run_mixture, layout, gated, num_ranks=2)
    assert {name for answer in answers for name in answer["weights"]} == weights.keys()
    for answer in answers:
        at = answer["positions"]
        assert tokens.grad is not None
        torch.testing.assert_close(answer["output"], output[at], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(answer["input"], tokens.grad[at], atol=1e-5, rtol=1e-5)
        for name, (found, part, num_parts) in answer["weights"].items():
            gradient = weights[name].grad
            assert gradient is not None
            assert gradient.abs().max() > 1e-2, name
            expected = part_of(name, gradient, part, num_parts)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name)
