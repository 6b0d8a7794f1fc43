"""The run directory, and which run of Weights & Biases goes on."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from miles.backends.training_utils import checkpoints
from miles.config.checkpoint import CheckpointConfig
from miles.config.data import DataConfig
from miles.config.errors import ConfigError
from miles.config.evaluation import EvaluationConfig
from miles.config.observability import ObservabilityConfig
from miles.config.root import MilesConfig
from miles.core.tracking import Tracker, read_metrics
from miles.report import draw_reward
from miles.rundir import (
    completed_rollouts,
    hold_directories,
    make_tracker,
    with_wandb_run,
    write_samples,
)

ROOT = Path(__file__).parents[2]
NO_RUN = MilesConfig()


def wandb_run(load: Path | None = None, **fields: str) -> str | None:
    config = dataclasses.replace(
        NO_RUN,
        observability=ObservabilityConfig(use_wandb=True, **fields),
        checkpoint=CheckpointConfig(load=None if load is None else str(load)),
    )
    return with_wandb_run(config).observability.wandb_run_id


def save(folder: Path, config: MilesConfig) -> None:
    checkpoints.prepare_staging(folder, 1, [])
    checkpoints.publish(folder, 1, {"config": config.to_dict()})


def test_without_wandb_there_is_no_run() -> None:
    assert with_wandb_run(NO_RUN) is NO_RUN


def test_every_fresh_run_gets_an_id_of_its_own(tmp_path: Path) -> None:
    first, second = wandb_run(), wandb_run(tmp_path / "nothing yet")
    assert first
    assert second
    assert first != second


def test_a_resumed_run_goes_on_in_the_run_of_its_checkpoint(tmp_path: Path) -> None:
    options = ObservabilityConfig(use_wandb=True, wandb_run_id="abc")
    save(tmp_path, dataclasses.replace(NO_RUN, observability=options))
    assert wandb_run(tmp_path) == "abc"
    assert wandb_run(tmp_path, wandb_run_id="other") == "other"


def test_a_checkpoint_of_a_run_without_wandb_starts_a_new_one(tmp_path: Path) -> None:
    save(tmp_path, NO_RUN)
    assert wandb_run(tmp_path)


def test_weights_to_start_from_are_no_run_that_goes_on(tmp_path: Path) -> None:
    checkpoints.prepare_staging(tmp_path, 0, [])
    checkpoints.publish(tmp_path, 0, {"backend": "megatron", **checkpoints.WEIGHTS_ONLY})
    assert wandb_run(tmp_path)


def resumed(folder: Path, num_rollout: int | None, eval_interval: int | None = None) -> MilesConfig:
    """A run that goes on from two rollouts, recorded in ``folder``."""
    checkpoints.prepare_staging(folder / "ckpt", 2, [])
    checkpoints.publish(folder / "ckpt", 2, {"config": {}})
    return dataclasses.replace(
        NO_RUN,
        data=DataConfig(num_rollout=num_rollout),
        checkpoint=CheckpointConfig(load=str(folder / "ckpt")),
        evaluation=EvaluationConfig(eval_interval=eval_interval),
        observability=ObservabilityConfig(run_dir=str(folder)),
    )


@pytest.mark.parametrize(("total", "done"), [(None, None), (3, None), (2, 2), (1, 2)])
def test_a_run_at_its_end_has_nothing_to_do(
    tmp_path: Path, total: int | None, done: int | None
) -> None:
    assert completed_rollouts(resumed(tmp_path, total)) == done


def test_a_run_without_a_checkpoint_or_with_a_start_of_its_own_has(tmp_path: Path) -> None:
    config = resumed(tmp_path, 2)
    fresh = dataclasses.replace(config, checkpoint=CheckpointConfig(load=str(tmp_path / "none")))
    assert completed_rollouts(fresh) is None
    started = dataclasses.replace(config, data=DataConfig(num_rollout=2, start_rollout_id=1))
    assert completed_rollouts(started) is None


def test_the_last_evaluation_is_made_up_for_unless_it_is_on_record(tmp_path: Path) -> None:
    assert completed_rollouts(resumed(tmp_path / "a", 2, eval_interval=3)) == 2
    config = resumed(tmp_path / "b", 2, eval_interval=2)
    assert completed_rollouts(config) is None
    tracker = Tracker(tmp_path / "b")
    tracker.log(1, {"eval/digits": 0.5})
    tracker.log(2, {"train/loss": 0.5})
    assert completed_rollouts(config) is None
    tracker.log(2, {"eval/digits": 0.5})
    tracker.close()
    assert completed_rollouts(config) == 2


def one_run(config: MilesConfig, run_dir: Path, rewards: dict[int, float]) -> None:
    """What a driver records."""
    options = ObservabilityConfig(run_dir=str(run_dir))
    config = dataclasses.replace(config, observability=options)
    with hold_directories(config) as folder:
        tracker = make_tracker(config, folder)
        for step, reward in rewards.items():
            tracker.log(step, {"rollout/raw_reward": reward})
            write_samples(folder, step - 1, [{"reward": reward}])
        tracker.close()
        draw_reward(folder)


def rewards_in(folder: Path) -> dict[int, float]:
    return {row["step"]: row["rollout/raw_reward"] for row in read_metrics(folder)}


def test_a_fresh_start_in_a_used_run_directory_sets_the_records_there_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ({1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.5, 2: 0.6}, {1: 0.7})
    for number, rewards in enumerate(runs):
        config = dataclasses.replace(NO_RUN, data=DataConfig(num_rollout=10 + number))
        one_run(config, tmp_path, rewards)
    aside = tmp_path / "earlier-1", tmp_path / "earlier-2"
    for number, folder in enumerate((*aside, tmp_path)):
        assert rewards_in(folder) == runs[number]
        assert (folder / "reward.png").stat().st_size > 0
        recorded = json.loads((folder / "config.json").read_text())
        assert recorded["data"]["num_rollout"] == 10 + number
    assert (tmp_path / "samples.txt").read_text().count("=== rollout") == 1
    shown = capsys.readouterr().out
    assert all(str(folder) in shown for folder in aside)


def test_a_resumed_run_goes_on_in_the_records_of_its_run_directory(tmp_path: Path) -> None:
    one_run(NO_RUN, tmp_path, {1: 0.1, 2: 0.2})
    one_run(resumed(tmp_path, 4), tmp_path, {3: 0.3, 4: 0.4})
    assert rewards_in(tmp_path) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert not (tmp_path / "earlier-1").exists()
    started = dataclasses.replace(NO_RUN, data=DataConfig(start_rollout_id=4))
    one_run(started, tmp_path, {5: 0.5})
    assert rewards_in(tmp_path)[1] == 0.1


def test_a_run_that_stopped_before_its_first_checkpoint_begins_its_records_again(
    tmp_path: Path,
) -> None:
    """The same command again: its --load holds nothing yet."""
    config = dataclasses.replace(NO_RUN, checkpoint=CheckpointConfig(load=str(tmp_path / "ckpt")))
    one_run(config, tmp_path, {1: 0.1})
    one_run(config, tmp_path, {1: 0.2})
    assert rewards_in(tmp_path) == {1: 0.2}
    assert rewards_in(tmp_path / "earlier-1") == {1: 0.1}


@pytest.mark.parametrize("shared", ["run", "ckpt"])
def test_a_second_run_in_a_directory_is_refused_with_flag_and_process(
    tmp_path: Path, shared: str
) -> None:
    def config(run: Path, ckpt: Path) -> MilesConfig:
        return dataclasses.replace(
            NO_RUN,
            observability=ObservabilityConfig(run_dir=str(run)),
            checkpoint=CheckpointConfig(save=str(ckpt)),
        )

    first = {"run": tmp_path / "run", "ckpt": tmp_path / "ckpt"}
    second = {"run": tmp_path / "run2", "ckpt": tmp_path / "ckpt2", shared: first[shared]}
    flag = {"run": "--run-dir", "ckpt": "--save"}[shared]
    told = rf"{flag} = .*{first[shared]}.*process {os.getpid()} on .*another directory"
    with (
        hold_directories(config(**first)),
        pytest.raises(ConfigError, match=told),
        hold_directories(config(**second)),
    ):
        pass
    with hold_directories(config(**second)):
        pass


def test_runs_that_begin_in_the_same_second_get_a_run_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        folders = {stack.enter_context(hold_directories(NO_RUN)) for _ in range(3)}
    assert len(folders) == 3


GIVEN_AGAIN = """
import pickle, sys
import ray
import train

assert train.run(pickle.load(open(sys.argv[1], "rb"))) == 0
assert not ray.is_initialized()
"""


def test_a_complete_run_that_is_given_again_ends_well_without_ray(tmp_path: Path) -> None:
    """In a process of its own: in this one other tests may have started Ray."""
    given = tmp_path / "config"
    given.write_bytes(pickle.dumps(resumed(tmp_path, 2)))
    result = subprocess.run(
        [sys.executable, "-c", GIVEN_AGAIN, given],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "nothing left to run: 2 rollouts are done\n"
