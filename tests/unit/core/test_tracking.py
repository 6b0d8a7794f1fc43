"""What ends up in ``metrics.jsonl``, also when a run is killed and resumed."""

import math
from pathlib import Path

from miles.core.tracking import Tracker, read_metrics


def log(run_dir: Path, *rows: tuple[int, dict[str, float]]) -> None:
    tracker = Tracker(run_dir)
    for step, metrics in rows:
        tracker.log(step, metrics)
    tracker.close()


def plain(run_dir: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(run_dir)]


def test_the_lines_of_a_step_make_one_row(tmp_path: Path) -> None:
    log(tmp_path, (1, {"train/loss": 0.5}), (1, {"perf/step_time": 2.0}), (2, {"train/loss": 0.4}))
    assert plain(tmp_path) == [
        {"step": 1, "train/loss": 0.5, "perf/step_time": 2.0},
        {"step": 2, "train/loss": 0.4},
    ]


def test_a_rollout_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    log(tmp_path, (1, {"rollout/raw_reward": 0.1}), (2, {"rollout/raw_reward": 0.2}))
    log(tmp_path, (2, {"rollout/raw_reward": 0.3, "perf/save_time": 1.0}))
    assert plain(tmp_path) == [
        {"step": 1, "rollout/raw_reward": 0.1},
        {"step": 2, "rollout/raw_reward": 0.3, "perf/save_time": 1.0},
    ]


def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    log(tmp_path, (1, {"train/loss": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "train/lo')
    log(tmp_path, (2, {"train/loss": 0.4}))
    assert plain(tmp_path) == [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.4}]


def test_what_is_not_a_finite_number_is_null(tmp_path: Path) -> None:
    log(tmp_path, (1, {"train/loss": math.nan}))
    assert plain(tmp_path) == [{"step": 1, "train/loss": None}]
