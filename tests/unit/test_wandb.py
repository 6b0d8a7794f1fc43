"""What Weights & Biases gets of a run, and of the one that resumes it; without a network."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from miles.backends.training_utils import checkpoints
from miles.config.checkpoint import CheckpointConfig
from miles.config.errors import ConfigError
from miles.config.observability import ObservabilityConfig
from miles.config.root import MilesConfig
from miles.rundir import hold_directories, make_tracker, with_wandb_run
from tests.wandb_files import history, only, records

wandb = pytest.importorskip("wandb")

Runs = tuple[str, list[Any], list[Any]]


def track(config: MilesConfig, run_dir: Path, *rows: tuple[int, dict[str, float]]) -> str | None:
    """A driver's use of the tracker; the id of the run."""
    observability = dataclasses.replace(config.observability, run_dir=str(run_dir))
    config = with_wandb_run(dataclasses.replace(config, observability=observability))
    with hold_directories(config) as folder:
        tracker = make_tracker(config, folder)
        for step, metrics in rows:
            tracker.log(step, metrics)
        tracker.close()
    if config.checkpoint.save is not None:
        checkpoints.prepare_staging(config.checkpoint.save, 2, [])
        checkpoints.publish(config.checkpoint.save, 2, {"config": config.to_dict()})
    return config.observability.wandb_run_id


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The id of the first run, its records, and those of the run that resumes its checkpoint."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("MODE", "DIR", "PROJECT", "RUN_ID", "RUN_GROUP", "RESUME"):
            patch.delenv(f"WANDB_{variable}", raising=False)
        patch.setenv("WANDB_SILENT", "true")
        run_id = track_two_runs(folder)
        # What is still buffered is written when W&B's own process ends.
        wandb.teardown()
    # Within the run directory, as --wandb-dir is not given; the file is named after the run.
    first, second = (
        list(records(file))
        for run in ("a", "b")
        for file in folder.glob(f"{run}/wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    )
    return run_id, first, second


def track_two_runs(folder: Path) -> str:
    """The second resumes the first; the id of both."""
    options = ObservabilityConfig(
        use_wandb=True, wandb_mode="offline", wandb_project="digits", wandb_group="grpo"
    )
    config = dataclasses.replace(MilesConfig(), observability=options)
    ckpt = str(folder / "ckpt")
    saving = dataclasses.replace(config, checkpoint=CheckpointConfig(save=ckpt))
    loading = dataclasses.replace(config, checkpoint=CheckpointConfig(load=ckpt))
    first = (1, {"train/loss": 0.5, "rollout/raw_reward": 0.25}), (2, {"train/loss": 0.4})
    run_id = track(saving, folder / "a", *first)
    assert run_id is not None
    assert track(loading, folder / "b", (3, {"train/loss": 0.3})) == run_id
    return run_id


def test_a_resumed_run_goes_on_in_the_run_whose_id_its_checkpoint_holds(runs: Runs) -> None:
    run_id, *both = runs
    for found in both:
        (run,) = only("run", found)
        assert (run.run_id, run.project, run.run_group) == (run_id, "digits", "grpo")
        (end,) = only("exit", found)
        assert end.exit_code == 0


def test_the_whole_config_is_recorded(runs: Runs) -> None:
    (run,) = only("run", runs[1])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config.keys() - {"_wandb"} == MilesConfig().to_dict().keys()
    assert config["observability"]["wandb_project"] == "digits"
    assert config["observability"]["wandb_run_id"] == runs[0]


def test_metrics_are_drawn_over_the_number_of_rollouts(runs: Runs) -> None:
    """W&B itself counts lines, of a resumed run from zero."""
    _, first, second = runs
    assert history(first) == [
        {"step": 1, "train/loss": 0.5, "rollout/raw_reward": 0.25},
        {"step": 2, "train/loss": 0.4},
    ]
    assert history(second) == [{"step": 3, "train/loss": 0.3}]
    for found in (first, second):
        assert [m.step_metric for m in only("metric", found) if m.glob_name == "*"] == ["step"]


def test_a_refusal_of_wandb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = ObservabilityConfig(
        use_wandb=True, wandb_mode="offline", wandb_project="a/b", wandb_run_id="abc"
    )
    config = dataclasses.replace(MilesConfig(), observability=options)
    with pytest.raises(ConfigError) as error:
        make_tracker(config, tmp_path)
    (problem,) = error.value.problems
    assert problem.flag == "--use-wandb"
    assert "a/b" in problem.remedy
    assert "\n" not in problem.remedy
