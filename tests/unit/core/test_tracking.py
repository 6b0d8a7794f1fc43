"""What ends up in ``metrics.jsonl``, also when a run is killed and resumed."""

import math
import re
from pathlib import Path

import pytest

from miles.core import tracking
from miles.core.tracking import MetricsError, Tracker, read_metrics


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


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(tmp_path, (1, {"train/loss": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "train/lo')
    said = list[str]()
    monkeypatch.setattr(tracking.log, "warning", lambda text, *args: said.append(text % args))
    assert plain(tmp_path) == [{"step": 1, "train/loss": 0.5}]
    (line,) = said
    assert str(tmp_path / "metrics.jsonl") in line


@pytest.mark.parametrize("broken", ['{"step": 2, "tr', "[]", "\0\0\0", '{"loss": 1}'])
def test_a_broken_line_before_others_is_an_error_with_file_and_line(
    tmp_path: Path, broken: str
) -> None:
    log(tmp_path, (1, {"train/loss": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{broken}\n")
    log(tmp_path, (3, {"train/loss": 0.5}))
    place = re.escape(f"{tmp_path / 'metrics.jsonl'}, line 2,")
    with pytest.raises(MetricsError, match=place):
        read_metrics(tmp_path)


def test_what_is_not_a_finite_number_is_null(tmp_path: Path) -> None:
    log(tmp_path, (1, {"train/loss": math.nan}))
    assert plain(tmp_path) == [{"step": 1, "train/loss": None}]
