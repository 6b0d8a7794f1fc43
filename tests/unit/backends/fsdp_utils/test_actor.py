from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from miles.contracts.types import Sample
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    LENGTHS,
    from_bytes,
    make_config,
    make_groups,
    make_rollouts,
    sizes_of_shards,
    train_rollouts,
)
from tests.unit.backends.fsdp_utils.made_families import make_listed_experts

SUPERVISED = {"loss_type": "sft_loss", "calculate_per_token_loss": True}
OPTIMIZER = {
    "lr": 3e-3,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
}
NUM_ROLLOUTS = 2
STEP = 4


def plain_training(
    model_path: Path, adam_eps: float = 1e-8
) -> tuple[list[tuple[float, float, float]], dict[str, Tensor]]:
    """One process, transformers' own forward, torch's AdamW: loss, gradient norm and rate by step.

    The rate warms up to 3e-3 in two steps, then falls linearly to 0 at step 8.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=True
    )
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=adam_eps, weight_decay=0.1)
    rates = iter([0.0, 1.5e-3, 3e-3, 3e-3 * 5 / 6])
    steps: list[tuple[float, float, float]] = []
    for rollout in range(NUM_ROLLOUTS):
        samples = [s for group in make_groups(rollout, LENGTHS) for s in group]
        for step in (samples[:STEP], samples[STEP:]):
            adam.zero_grad()
            loss = sum(negative_log_likelihood(logits_of(model, s), s) for s in step)
            loss = loss / sum(sum(s.loss_mask) for s in step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.param_groups[0]["lr"] = rate = next(rates)
            adam.step()
            steps.append((loss.item(), norm.item(), rate))
    return steps, {name: p.detach() for name, p in model.named_parameters()}


def logits_of(model: Any, sample: Sample) -> Tensor:
    return model(input_ids=torch.tensor(sample.tokens)[None], use_cache=False).logits[0]


def negative_log_likelihood(logits: Tensor, sample: Sample) -> Tensor:
    """Summed over the tokens that count; ``logits`` of all tokens of the sample."""
    tokens = torch.tensor(sample.tokens)
    log_probs = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None]).squeeze(1)
    return -(log_probs[-sample.response_length :] * torch.tensor(sample.loss_mask)).sum()


@pytest.fixture(scope="module")
def listed_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_listed_experts(tmp_path_factory.mktemp("models"), num_experts=24)


@pytest.fixture(scope="module")
def plain(tiny_qwen3: Path) -> Any:
    return plain_training(tiny_qwen3)


def assert_like_plain(result: dict[str, Any], plain: Any) -> None:
    steps, weights = plain
    assert len(result["steps"]) == len(steps)
    for step, (loss, norm, rate) in zip(result["steps"], steps, strict=True):
        assert step.loss == pytest.approx(loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(norm, rel=1e-5, abs=1e-5)
        assert step.learning_rate == pytest.approx(rate, abs=1e-12)
        assert not step.skipped
    assert set(result["weights"]) == set(weights)
    for name, value in result["weights"].items():
        torch.testing.assert_close(
            from_bytes(value), weights[name].reshape(-1), atol=1e-5, rtol=0, msg=name
        )


@pytest.mark.parametrize(
    ("data", "fsdp"),
    [
        ({}, {}),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 2}, {}),
        ({}, {"gradient_checkpointing": True}),
        ({}, {"attn_implementation": "eager"}),
    ],
    ids=["packed", "padded", "recomputed", "eager"],
)
def test_two_ranks_train_like_one_plain_process(
    two_ranks: Ranks, tiny_qwen3: Path, plain: Any, data: dict[str, Any], fsdp: dict[str, Any]
) -> None:
    config = make_config(
        tiny_qwen3, algorithm=SUPERVISED, optimizer=OPTIMIZER, data=data, fsdp=fsdp
    )
    rollouts = make_rollouts(config, NUM_ROLLOUTS)
    for result in two_ranks.run_well(train_rollouts, config, rollouts):
        assert_like_plain(result, plain)


def test_ranks_that_hold_nothing_of_a_parameter_train_like_one_plain_process(
    two_ranks: Ranks, narrow_qwen3: Path
) -> None:
    config = make_config(narrow_qwen3, algorithm=SUPERVISED, optimizer=OPTIMIZER)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert [sizes[name] for sizes in two_ranks.run_well(sizes_of_shards, config)] == [64, 0]
    plain = plain_training(narrow_qwen3)
    rollouts = make_rollouts(config, NUM_ROLLOUTS)
    for result in two_ranks.run_well(train_rollouts, config, rollouts):
        assert_like_plain(result, plain)


@pytest.mark.parametrize(
    "sharded", [False, True], ids=["reduced with the last micro-batch", "with each"]
)
def test_parameters_that_only_some_ranks_use_train_like_one_plain_process(
    two_ranks: Ranks, listed_experts: Path, sharded: bool
) -> None:
    """Some of the experts are used by one rank alone in a step, some by none."""
    config = make_config(
        listed_experts,
        algorithm=SUPERVISED,
        optimizer=OPTIMIZER,
        data={"max_tokens_per_gpu": 20},
        fsdp={"accumulate_sharded_gradients": sharded},
    )
    plain = plain_training(listed_experts)
    rollouts = make_rollouts(config, NUM_ROLLOUTS)
    for result in two_ranks.run_well(train_rollouts, config, rollouts):
        assert_like_plain(result, plain)


def test_a_parameter_first_used_by_the_last_micro_batch_of_a_bf16_step_is_reduced_too(
    two_ranks: Ranks, listed_experts: Path
) -> None:
    data = {"max_tokens_per_gpu": 20}
    config = make_config(listed_experts, algorithm=SUPERVISED, data=data, precision={"fp32": False})
    (norm, *_) = (norm for _, norm, _ in plain_training(listed_experts)[0])
    for result in two_ranks.run_well(train_rollouts, config, make_rollouts(config, 1)):
        assert result["steps"][0].grad_norm == pytest.approx(norm, rel=0.1)


def test_one_rank_trains_like_one_plain_process(
    two_ranks: Ranks, tiny_qwen3: Path, plain: Any
) -> None:
    config = make_config(tiny_qwen3, algorithm=SUPERVISED, optimizer=OPTIMIZER)
    rollouts = make_rollouts(config, NUM_ROLLOUTS, dp_size=1)
    (result,) = two_ranks.run_well(train_rollouts, config, rollouts, num_ranks=1)
    assert_like_plain(result, plain)


@pytest.mark.full
def test_hybrid_sharding_trains_like_one_plain_process(tiny_qwen3: Path, plain: Any) -> None:
    """However gradients accumulate. Six samples on four ranks: fillers take part in the last
    step."""
    ranks = Ranks(4)
    try:
        for sharded in (False, True):
            config = make_config(
                tiny_qwen3,
                algorithm=SUPERVISED,
                optimizer=OPTIMIZER,
                fsdp={"dp_replicate_size": 2, "accumulate_sharded_gradients": sharded},
            )
            rollouts = make_rollouts(config, NUM_ROLLOUTS, dp_size=4)
            for result in ranks.run_well(train_rollouts, config, rollouts):
                assert_like_plain(result, plain)
    finally:
        ranks.close()
