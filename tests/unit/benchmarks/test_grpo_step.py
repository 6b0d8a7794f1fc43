"""The arithmetic of the GRPO step benchmark."""

import pytest

from benchmarks.grpo_step import medians, miles_row, table


def test_outside_is_the_step_without_generating_and_training() -> None:
    row = miles_row(
        {
            "perf/step_time": 10.0,
            "perf/generate_time": 4.0,
            "perf/optimizer_steps_time": 3.0,
            "perf/log_probs_time": 1.0,
            "perf/update_weights_time": 0.5,
        }
    )
    assert row == {"step": 10.0, "generate": 4.0, "train": 4.0, "outside": 2.0, "sync": 0.5}


def test_warm_up_steps_do_not_count() -> None:
    rows = [{"step": s} for s in (100.0, 50.0, 1.0, 3.0, 2.0)]
    assert medians(rows, 2) == {"step": 2.0}
    with pytest.raises(ValueError, match="all of them warm-up"):
        medians(rows, 5)


def test_the_ratio_is_how_many_times_as_fast_as_trl() -> None:
    miles = {"step": 10.0, "generate": 6.0, "train": 3.0, "outside": 1.0, "sync": 0.5}
    text = table({"TRL fp32": {"step": 25.0, "generate": 5.0, "train": 20.0}, "Miles fp32": miles})
    lines = text.splitlines()
    assert lines[-2].split(" | ")[1:] == ["25.00", "5.00", "20.00", "", "", "1.00 |"]
    assert lines[-1].split(" | ")[1:] == ["10.00", "6.00", "3.00", "1.00", "10.0", "2.50 |"]
