"""The table and the picture at the end of a run."""

from pathlib import Path

import pytest

from miles.core.console import RunConsole
from miles.core.tracking import Tracker
from miles.report import draw_reward, main, summarize


def record(run_dir: Path, rewards: list[float]) -> None:
    tracker = Tracker(run_dir)
    tracker.log(0, {"eval/digits": 0.5})
    for step, reward in enumerate(rewards, 1):
        tracker.log(step, {"rollout/raw_reward": reward})
    tracker.close()


def test_the_table_says_over_how_many_rollouts_it_takes_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, [0.1, 0.3, 0.9, 0.5, 0.7])
    summarize(tmp_path, RunConsole(5))
    shown = capsys.readouterr().out
    assert "first 2 and the last 2 rollouts" in shown
    assert "0.200" in shown
    assert "0.600" in shown


def test_a_supervised_run_is_summed_up_by_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path)
    for step, loss in enumerate([4.0, 3.0, 1.5, 0.5], 1):
        tracker.log(step, {"train/loss": loss})
    tracker.close()
    summarize(tmp_path, RunConsole(4))
    shown = capsys.readouterr().out
    assert "loss" in shown
    assert "+3.5000" in shown
    assert "+1.0000" in shown
    assert "reward" not in shown


def test_a_run_on_rewards_is_not_summed_up_by_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path)
    for step in (1, 2):
        tracker.log(step, {"rollout/raw_reward": 0.5, "train/loss": 0.01})
    tracker.close()
    summarize(tmp_path, RunConsole(2))
    shown = capsys.readouterr().out
    assert "mean reward" in shown
    assert "loss" not in shown


def test_a_run_without_rewards_has_no_picture(tmp_path: Path) -> None:
    record(tmp_path, [])
    assert draw_reward(tmp_path) is None


def test_a_directory_that_is_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path} has no metrics.jsonl" in capsys.readouterr().err


def test_several_runs_are_compared_in_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        record(tmp_path / name, [0.1, 0.2])
    picture = tmp_path / "pictures" / "both.png"
    main([str(tmp_path / "one"), str(tmp_path / "two"), "--picture", str(picture)])
    assert picture.stat().st_size > 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "one") in shown
    assert str(tmp_path / "two") in shown


def test_a_broken_line_ends_the_report_with_its_place_instead_of_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "rollout/raw_\n{"step": 2, "rollout/raw_reward": 1.0}\n')
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"{metrics}, line 1" in capsys.readouterr().err


def test_a_run_that_was_killed_while_it_wrote_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, [0.25, 0.25])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "rollout/raw_rew')
    main([str(tmp_path)])
    assert "0.250" in capsys.readouterr().out


def test_the_picture_of_one_run_goes_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", [0.1, 0.3])
    picture = tmp_path / "pictures" / "mine.png"
    main([str(tmp_path / "run"), "--picture", str(picture)])
    assert picture.stat().st_size > 0
    assert not (tmp_path / "run" / "reward.png").exists()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run"), "--picture", str(tmp_path / "file" / "x.png")])
    assert "the picture cannot be written: " in capsys.readouterr().err
