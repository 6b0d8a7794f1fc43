"""The routers' auxiliary losses: independent of the layout, and left out of fillers and padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import LENGTHS, make_groups, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import SUPERVISED
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_rollouts
from tests.unit.backends.megatron_utils.layouts import Layout, params

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
]


def auxiliary_losses(router_logits: tuple[Tensor, ...]) -> Tensor:
    """Switch Transformer's loss (arXiv:2101.03961, equation 4; over the top two, so that counts
    are divided by two) and ST-MoE's z-loss (arXiv:2202.08906), summed over layers."""
    total = torch.zeros(())
    for logits_TxE in router_logits:
        num_tokens, num_experts = logits_TxE.shape
        probs = logits_TxE.softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(2).indices, 1.0)
        share_E = chosen.sum(0) / (2 * num_tokens)
        total = total + AUX * num_experts * (share_E * probs.mean(0)).sum()
        total = total + Z * logits_TxE.logsumexp(-1).square().mean()
    return total


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps in one process, a sample a micro-batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    samples = [s for group in make_groups(0, LENGTHS) for s in group]
    seen: list[tuple[float, float]] = []
    for step in (samples[:STEP], samples[STEP:]):
        adam.zero_grad()
        num_targets = sum(sum(s.loss_mask) for s in step)
        num_tokens = sum(len(s.tokens) for s in step)
        loss = 0.0
        for sample in step:
            tokens = torch.tensor(sample.tokens)
            out = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
            log_probs = torch.log_softmax(out.logits[0, :-1], -1)
            log_probs = log_probs.gather(1, tokens[1:, None]).squeeze(1)
            mask = torch.tensor(sample.loss_mask)
            nll = -(log_probs[-sample.response_length :] * mask).sum() / num_targets
            auxiliary = auxiliary_losses(out.router_logits) * len(tokens) / num_tokens
            (nll + auxiliary).backward()
            loss += nll.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        seen.append((loss, norm.item()))
    return seen


@pytest.mark.parametrize("layout", params(LAYOUTS))
def test_the_step_adds_the_token_weighted_mean_over_its_micro_batches(
    megatron_ranks: Ranks,
    models: dict[str, Path],
    plain: list[tuple[float, float]],
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
        for step, (loss, norm) in zip(answer["steps"], plain, strict=True):
            assert step.loss == pytest.approx(loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(norm, rel=1e-5)
