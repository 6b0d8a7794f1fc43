"""The routers' auxiliary losses: independent of the layout, and left out of fillers and padding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import LENGTHS, make_groups, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import SUPERVISED, negative_log_likelihood
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_rollouts
from tests.unit.backends.megatron_utils.layouts import RECOMPUTE, Layout, params

AUX, Z = 0.5, 0.05
FLAGS = (
    *("--moe-router-load-balancing-type", "aux_loss"),
    *("--moe-aux-loss-coeff", str(AUX)),
    *("--moe-z-loss-coeff", str(Z)),
)
STEP = 4
LAYOUTS = [
    Layout(model="moe"),
    Layout(model="moe", tp=2, ep=2, sequence_parallel=True, quick=True),
    Layout(model="moe", cp=2, ep=2),
    Layout(model="moe", ep=4, dp=4, quick=True),
    Layout(model="moe", tp=2, pp=2, vpp=2, sequence_parallel=True),
    Layout(model="moe", pp=2, ep=2, dp=2, flags=RECOMPUTE, note="recompute"),
]


@dataclass(frozen=True)
class Step:
    """What one process finds in an optimizer step."""

    loss: float
    grad_norm: float
    balance: float
    z: float
    """Means over tokens and layers, without coefficients."""


def auxiliary_losses(router_logits: tuple[Tensor, ...]) -> Tensor:
    """Switch Transformer's loss (arXiv:2101.03961, equation 4; over the top two, so that counts
    are divided by two) and ST-MoE's z-loss (arXiv:2202.08906), summed over layers: ``[2]``."""
    total = torch.zeros(2)
    for logits_TxE in router_logits:
        num_tokens, num_experts = logits_TxE.shape
        probs = logits_TxE.softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(2).indices, 1.0)
        share_E = chosen.sum(0) / (2 * num_tokens)
        balance = num_experts * (share_E * probs.mean(0)).sum()
        total = total + torch.stack([balance, logits_TxE.logsumexp(-1).square().mean()])
    return total


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> list[Step]:
    """Two steps in one process, a sample a micro-batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    samples = [s for group in make_groups(0, LENGTHS) for s in group]
    seen: list[Step] = []
    for step in (samples[:STEP], samples[STEP:]):
        adam.zero_grad()
        num_targets = sum(sum(s.loss_mask) for s in step)
        num_tokens = sum(len(s.tokens) for s in step)
        loss, means = 0.0, torch.zeros(2)
        for sample in step:
            tokens = torch.tensor(sample.tokens)
            out = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
            nll = negative_log_likelihood(out.logits[0], sample) / num_targets
            auxiliary = auxiliary_losses(out.router_logits) * len(tokens) / num_tokens
            (nll + (torch.tensor([AUX, Z]) * auxiliary).sum()).backward()
            loss += nll.item()
            means += auxiliary.detach() / len(out.router_logits)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        seen.append(Step(loss, norm.item(), *means.tolist()))
    return seen


@pytest.mark.parametrize("layout", params(LAYOUTS))
def test_the_step_adds_the_token_weighted_mean_over_its_micro_batches(
    megatron_ranks: Ranks,
    models: dict[str, Path],
    plain: list[Step],
    layout: Layout,
) -> None:
    config = make_config(
        models["moe"],
        *layout.argv,
        *FLAGS,
        algorithm=SUPERVISED,
        data={"use_dynamic_batch_size": False, "micro_batch_size": 1},
        cluster={"context_parallel_size": layout.cp},
    )
    # Six samples on four ranks: fillers take part in the second step.
    rollouts = make_rollouts(config, 1, dp_size=layout.dp)
    answers = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=layout.num_ranks)
    for answer in answers:
        for step, expected in zip(answer["steps"], plain, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert step.sums["moe_load_balancing_loss"] == pytest.approx(expected.balance, rel=1e-5)
            assert step.sums["moe_z_loss"] == pytest.approx(expected.z, rel=1e-5)
        (metrics,) = answer["metrics"]
        balance = sum(step.balance for step in plain) / len(plain)
        assert metrics["train/moe_load_balancing_loss"] == pytest.approx(balance, rel=1e-5)


def test_a_mixture_without_auxiliary_losses_has_none_among_its_metrics(
    megatron_ranks: Ranks, models: dict[str, Path]
) -> None:
    config = make_config(models["moe"], algorithm=SUPERVISED)
    rollouts = make_rollouts(config, 1, dp_size=1)
    (answer,) = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=1)
    assert not [name for name in answer["metrics"][0] if "moe_" in name]


@pytest.mark.parametrize(("pattern", "count"), [(1, 5), (2, 3), (3, 2), ([0, 1, 1, 0, 1], 3)])
def test_layers_with_experts_are_counted_as_megatron_places_them(
    pattern: int | list[int], count: int
) -> None:
    """Every N-th layer from the first, or a pattern."""
    from types import SimpleNamespace

    from miles.backends.megatron_utils.router import num_moe_layers

    assert num_moe_layers(SimpleNamespace(moe_layer_freq=pattern, num_layers=5)) == count
