"""The run directory, and which run of Weights & Biases goes on."""

import dataclasses
from pathlib import Path

from miles.backends.training_utils import checkpoints
from miles.config.checkpoint import CheckpointConfig
from miles.config.observability import ObservabilityConfig
from miles.config.root import MilesConfig
from miles.rundir import with_wandb_run

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
