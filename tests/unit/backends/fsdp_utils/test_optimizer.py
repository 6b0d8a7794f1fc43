import math
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.backends.fsdp_utils.optimizer import LossScale
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    from_bytes,
    gradient_norms,
    gradients_between_micro_batches,
    make_config,
    make_rollouts,
    noted_units,
    reference_over_rollouts,
    step_with_a_bad_gradient,
    step_with_a_constant_loss,
    stored_dtypes,
    train_rollouts,
)

SCHEDULE = {"lr": 1e-3, "lr_decay_style": "linear"}
HALF = {"precision": {"fp32": False, "fp16": True}}
BF16 = {"precision": {"fp32": False}}
NO_MASTER = {**BF16, "fsdp": {"keep_fp32_master": False}}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    two_ranks: Ranks, tiny_qwen3: Path, bad: float
) -> None:
    config = make_config(tiny_qwen3, optimizer=SCHEDULE)
    answers = two_ranks.run_well(step_with_a_bad_gradient, config, make_rollouts(config, 1), bad)
    for answer in answers:
        assert [step.skipped for step in answer["steps"]] == [False, True, False]
        assert not math.isfinite(answer["steps"][1].grad_norm)
        before, skipped, after = answer["states"]
        assert skipped == before
        assert after[0] != before[0]
        # Eight steps in all: the rate depends on the position alone.
        rates = [step.learning_rate for step in answer["steps"]]
        assert rates == pytest.approx([1e-3, 1e-3 * 7 / 8, 1e-3 * 6 / 8])
        assert answer["steps"][0].sums == answers[0]["steps"][0].sums


def test_a_loss_without_a_gradient_moves_nothing(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    """A user's loss may have nothing to say about a micro-batch."""
    config = make_config(tiny_qwen3)
    answers = two_ranks.run_well(step_with_a_constant_loss, config, make_rollouts(config, 1))
    for answer in answers:
        assert answer["grad_norm"] == 0.0
        assert answer["loss"] == 0.25 * sum(other["batches"] for other in answers)


def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(
    two_ranks: Ranks, tiny_qwen3: Path
) -> None:
    config = make_config(tiny_qwen3, **HALF)
    rollouts = make_rollouts(config, 1)
    for answer in two_ranks.run_well(step_with_a_bad_gradient, config, rollouts, math.inf):
        assert [step.skipped for step in answer["steps"]] == [False, True, False]
        before, skipped, _ = answer["states"]
        assert skipped == before
        assert answer["scale"] == (2.0**15, 1)


@pytest.mark.parametrize(
    ("groups", "tolerance"),
    [(BF16, 0.05), (HALF, 0.02), (NO_MASTER, 0.05)],
    ids=["bf16", "fp16", "bf16 without master"],
)
def test_half_precision_trains_like_fp32(
    two_ranks: Ranks, tiny_qwen3_untied: Path, groups: dict[str, Any], tolerance: float
) -> None:
    algorithm = {"loss_type": "sft_loss"}
    config = make_config(tiny_qwen3_untied, algorithm=algorithm)
    rollouts = make_rollouts(config, 3)
    exact, _ = two_ranks.run_well(train_rollouts, config, rollouts)
    half_config = make_config(tiny_qwen3_untied, algorithm=algorithm, **groups)
    half, _ = two_ranks.run_well(train_rollouts, half_config, rollouts)
    for step, reference in zip(half["steps"], exact["steps"], strict=True):
        assert step.loss == pytest.approx(reference.loss, rel=tolerance)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=tolerance)
    start = from_bytes(exact["weights"]["lm_head.weight"]).float()
    end = from_bytes(half["weights"]["lm_head.weight"]).float()
    # Three rollouts of two steps move a weight by up to 6e-3.
    assert (start - end).abs().mean() < 1e-3


@pytest.mark.parametrize(
    ("groups", "dtypes"),
    [
        ({}, {"torch.float32"}),
        (BF16, {"torch.float32"}),
        (NO_MASTER, {"torch.bfloat16"}),
    ],
)
def test_parameters_and_moments_are_fp32_unless_told_otherwise(
    two_ranks: Ranks, tiny_qwen3_untied: Path, groups: dict[str, Any], dtypes: set[str]
) -> None:
    config = make_config(tiny_qwen3_untied, **groups)
    assert two_ranks.run_well(stored_dtypes, config) == [dtypes, dtypes]


def test_clearing_the_moments_makes_every_rollout_a_first_one(
    two_ranks: Ranks, tiny_qwen3: Path
) -> None:
    """With one step a rollout, Adam's first step moves each weight by the rate, up or down."""
    optimizer = {"lr": 1e-2, "clip_grad": 0.0, "adam_eps": 1e-12}
    config = make_config(
        tiny_qwen3,
        algorithm={"loss_type": "sft_loss", "reset_optimizer_states": True},
        optimizer=optimizer,
        data={"global_batch_size": 6},
    )
    rollouts = make_rollouts(config, 2)
    one, _ = two_ranks.run_well(train_rollouts, config, rollouts[:1])
    two, _ = two_ranks.run_well(train_rollouts, config, rollouts)
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (from_bytes(two["weights"][name]) - from_bytes(one["weights"][name])).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2), atol=1e-5, rtol=0)


def test_the_reference_stays_until_its_interval_is_over(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
    config = make_config(tiny_qwen3, algorithm=algorithm)
    for seen in two_ranks.run_well(reference_over_rollouts, config, make_rollouts(config, 3)):
        start, first, second, third = seen
        assert start["policy"] == start["ref"] == first["ref"]
        assert second["ref"] == second["policy"] != first["policy"]
        assert third["ref"] == second["policy"] != third["policy"]


def test_log_probs_leave_nothing_that_grows(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = make_config(tiny_qwen3)
    for seen in two_ranks.run_well(noted_units, config, make_rollouts(config, 1)):
        assert seen == [0] * 6


def test_the_reference_can_be_another_model(
    two_ranks: Ranks, tiny_qwen3: Path, tiny_qwen3_untied: Path
) -> None:
    config = make_config(tiny_qwen3, algorithm={"ref_load": str(tiny_qwen3_untied)})
    (seen, _), _ = two_ranks.run_well(reference_over_rollouts, config, make_rollouts(config, 1))
    other = make_config(tiny_qwen3_untied)
    (plain, _), _ = two_ranks.run_well(reference_over_rollouts, other, make_rollouts(config, 1))
    assert seen["ref"] == plain["policy"]
    assert seen["policy"] != seen["ref"]


def test_the_loss_scale_doubles_after_its_interval_and_never_falls_below_one() -> None:
    scale = LossScale(enabled=True)
    for _ in range(LossScale.GROWTH_INTERVAL):
        assert scale.value == 2.0**16
        scale.update(overflow=False)
    assert (scale.value, scale.good_steps) == (2.0**17, 0)
    scale.update(overflow=False)
    for _ in range(20):
        scale.update(overflow=True)
    assert (scale.value, scale.good_steps) == (1.0, 0)


def test_without_fp16_there_is_no_loss_scale() -> None:
    scale = LossScale(enabled=False)
    scale.update(overflow=True)
    assert scale.value == 1.0


def test_between_micro_batches_a_rank_may_hold_its_shard_of_the_gradients_and_no_more(
    two_ranks: Ranks, tiny_qwen3: Path
) -> None:
    data = {"max_tokens_per_gpu": 20}
    config = make_config(tiny_qwen3, data=data, fsdp={"accumulate_sharded_gradients": True})
    rollouts = make_rollouts(config, 2)
    for answer in two_ranks.run_well(gradients_between_micro_batches, config, rollouts):
        first, *others = answer["held"]
        assert set(first) == {0}
        assert others
        assert all(held == answer["shards"] for held in others)
    whole = two_ranks.run_well(train_rollouts, make_config(tiny_qwen3, data=data), rollouts)
    sharded = two_ranks.run_well(train_rollouts, config, rollouts)
    for one, other in zip(sharded, whole, strict=True):
        for step, expected in zip(one["steps"], other["steps"], strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-6)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16(
    two_ranks: Ranks, tiny_qwen3_untied: Path
) -> None:
    config = make_config(tiny_qwen3_untied, **NO_MASTER, optimizer={"clip_grad": 0.0})
    for norms in two_ranks.run_well(gradient_norms, config, make_rollouts(config, 1)):
        for reported, exact in norms:
            assert reported == pytest.approx(exact, rel=1e-5)
