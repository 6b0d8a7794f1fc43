import math
from typing import Any

import pytest

from miles.backends.training_utils.metrics import finalize
from miles.contracts.types import StepStats


def step(**fields: Any) -> StepStats:
    defaults: dict[str, Any] = {
        "loss": 1.0,
        "grad_norm": 2.0,
        "learning_rate": 0.1,
        "skipped": False,
        "sums": {},
    }
    return StepStats(**{**defaults, **fields})


def test_means_are_averaged_over_steps_and_the_last_learning_rate_is_shown() -> None:
    steps = [
        step(loss=1.0, grad_norm=2.0, learning_rate=0.1, sums={"pg_loss": 0.5}),
        step(loss=3.0, grad_norm=4.0, learning_rate=0.2, sums={"pg_loss": 1.5}),
    ]
    assert finalize(steps) == {
        "train/loss": 2.0,
        "train/grad_norm": 3.0,
        "train/lr": 0.2,
        "train/skipped_steps": 0.0,
        "train/pg_loss": 1.0,
    }


def test_engine_mismatch_is_divided_by_the_tokens_compared_in_all_steps() -> None:
    steps = [
        step(sums={"train_rollout_logprob_abs_diff": 3.0, "compared_tokens": 1.0}),
        step(sums={"train_rollout_logprob_abs_diff": 1.0, "compared_tokens": 7.0}),
    ]
    metrics = finalize(steps)
    assert metrics["train/train_rollout_logprob_abs_diff"] == 0.5
    assert "train/compared_tokens" not in metrics


def test_where_nothing_was_compared_there_is_no_difference_of_zero() -> None:
    sums = {"train_rollout_kl": 0.0, "compared_tokens": 0.0, "invalid_rollout_log_probs": 4.0}
    metrics = finalize([step(sums=sums), step(sums=sums)])
    assert "train/train_rollout_kl" not in metrics
    assert metrics["train/invalid_rollout_log_probs"] == 8


def test_effective_sample_ratio() -> None:
    # Ratios 1 and 3: (1 + 3)^2 / (2 * (1 + 9)).
    sums = {"ratio_sum": 4.0, "ratio_square_sum": 10.0, "active_tokens": 2.0}
    assert finalize([step(sums=sums)])["train/ess_ratio"] == pytest.approx(0.8)
    empty = dict.fromkeys(sums, 0.0)
    assert finalize([step(sums=empty)])["train/ess_ratio"] == 1


def test_skipped_steps_are_counted_and_left_out_of_means() -> None:
    skipped = step(loss=math.nan, grad_norm=math.inf, skipped=True, sums={"pg_loss": math.nan})
    metrics = finalize([skipped, step(sums={"pg_loss": 0.5})])
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/loss"] == 1
    assert metrics["train/grad_norm"] == 2
    assert metrics["train/pg_loss"] == 0.5
    assert math.isnan(finalize([skipped])["train/loss"])


def test_a_users_metric_passes_through() -> None:
    assert finalize([step(sums={"mine": 2.0})])["train/mine"] == 2


def test_a_rollout_without_steps() -> None:
    assert finalize([]) == {"train/skipped_steps": 0.0}
