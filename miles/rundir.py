"""The run directory: config, metrics and samples of a run."""

import itertools
import json
import os
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from miles.backends.training_utils import checkpoints
from miles.config import record
from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.core import locks
from miles.core.console import RunConsole
from miles.core.tracking import (
    METRICS_FILE,
    MetricsError,
    Tracker,
    TrackingError,
    WandbSettings,
    read_metrics,
)
from miles.report import PICTURE_FILE

SAMPLES_FILE = "samples.txt"
LOGS_FOLDER = "logs"

RECORDS = (record.FILE, METRICS_FILE, SAMPLES_FILE, PICTURE_FILE, LOGS_FOLDER)
"""What a run leaves in its run directory."""


@contextmanager
def hold_directories(config: MilesConfig) -> Generator[Path]:
    """The run directory (``--run-dir``, by default ``runs/<time>``), made and begun. It and
    ``--save`` are this process's own until the end. Raises ``ConfigError``."""
    with ExitStack() as stack:
        run_dir = _make_run_dir(config.observability.run_dir)
        _hold(stack, "--run-dir", run_dir)
        save = config.checkpoint.save
        if save is not None:
            with _refusing("--save", save):
                Path(save).mkdir(parents=True, exist_ok=True)
            _hold(stack, "--save", Path(save))
        begin_records(config, run_dir)
        yield run_dir


def begin_records(config: MilesConfig, run_dir: Path) -> None:
    """Write the run's config. What an earlier run left there is set aside, unless this one goes on
    behind its first rollout: curves of two runs in one file would be those of neither.

    Raises ``ConfigError``."""
    with _refusing("--run-dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        if _is_used(run_dir) and _first_rollout_id(config) == 0:
            aside = _set_aside(run_dir)
            RunConsole(0).say(f"a fresh start: records of the earlier run are now in {aside}")
        record.write_record(run_dir, config)


def _make_run_dir(given: str | None) -> Path:
    name = given or os.path.join("runs", datetime.now().strftime("%Y%m%d-%H%M%S"))
    run_dir = Path(name).resolve()
    with _refusing("--run-dir", run_dir):
        if given is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            return run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                run_dir.mkdir()
                break
            except FileExistsError:  # Another run began in this second.
                run_dir = run_dir.with_name(f"{Path(name).name}-{number}")
    return run_dir


def _hold(stack: ExitStack, flag: str, folder: Path) -> None:
    try:
        with _refusing(flag, folder):
            stack.enter_context(locks.held(folder))
    except locks.HeldError as error:
        remedy = f"another run writes there ({error}); give another directory, or end that run"
        raise ConfigError([Problem(flag, str(folder), remedy)]) from None


@contextmanager
def _refusing(flag: str, folder: str | Path) -> Generator[None]:
    """Errors of the file system are about a flag."""
    try:
        yield
    except OSError as error:
        problem = Problem(flag, str(folder), f"cannot be written: {error}")
        raise ConfigError([problem]) from error


def _is_used(run_dir: Path) -> bool:
    files = (run_dir / METRICS_FILE, run_dir / SAMPLES_FILE)
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def _first_rollout_id(config: MilesConfig) -> int:
    given = config.data.start_rollout_id
    return checkpoints.first_rollout_id(config.checkpoint.load) if given is None else given


def _set_aside(run_dir: Path) -> Path:
    """Move the records of a run into a directory of their own, of which they are the run."""
    names = (f"earlier-{number}" for number in itertools.count(1))
    aside = next(run_dir / name for name in names if not (run_dir / name).exists())
    aside.mkdir()
    for name in RECORDS:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    return aside


def completed_rollouts(config: MilesConfig) -> int | None:
    """How many rollouts are done where a run would go on after its end, and has nothing to make up
    for: the last evaluation is on record, or none was due. ``None``: there is something to do, or
    only the prompts tell (``--num-epoch``)."""
    options, total = config.data, config.data.num_rollout
    if total is None or options.start_rollout_id is not None:
        return None
    done = checkpoints.first_rollout_id(config.checkpoint.load)
    interval = config.evaluation.eval_interval
    due = interval is not None and done % interval == 0
    if done < total or (due and not _is_evaluated(config.observability.run_dir, done)):
        return None
    return done


def _is_evaluated(run_dir: str | None, step: int) -> bool:
    if run_dir is None or not (Path(run_dir) / METRICS_FILE).exists():
        return False
    try:
        rows = read_metrics(Path(run_dir))
    except MetricsError:
        return False  # What is not on record is made up for.
    return any(k.startswith("eval/") for row in rows if row["step"] == step for k in row)


def with_wandb_run(config: MilesConfig) -> MilesConfig:
    """Settle the W&B run: ``--wandb-run-id``, else the one of the checkpoint that is resumed, else
    a new one. Checkpoints hold the config, and so the run; weights to start from hold none."""
    options = config.observability
    if not options.use_wandb or options.wandb_run_id is not None:
        return config
    folder = checkpoints.resolve_load(config.checkpoint.load, announce=False)
    saved: dict[str, Any] = {}
    if folder is not None and not checkpoints.is_weights_only(folder):
        saved = checkpoints.read_metadata(folder)["config"]["observability"]
    run_id = saved.get("wandb_run_id") or uuid.uuid4().hex[:8]
    return replace(config, observability=replace(options, wandb_run_id=run_id))


def make_tracker(config: MilesConfig, run_dir: Path) -> Tracker:
    """Raises ``ConfigError`` where nothing can be written, or Weights & Biases refuses."""
    options = config.observability
    wandb = WandbSettings(
        project=options.wandb_project,
        entity=options.wandb_team,
        group=options.wandb_group,
        mode=options.wandb_mode,
        dir=options.wandb_dir,
        run_id=options.wandb_run_id,
        config=config.to_dict(),
    )
    try:
        return Tracker(
            run_dir,
            tensorboard_dir=options.tensorboard_dir,
            wandb=wandb if options.use_wandb else None,
        )
    except OSError as error:
        flags = "--run-dir, --tensorboard-dir, --wandb-dir"
        values = ", ".join(map(str, (run_dir, options.tensorboard_dir, options.wandb_dir)))
        raise ConfigError([Problem(flags, values, f"cannot be written: {error}")]) from error
    except TrackingError as error:
        remedy = f"Weights & Biases refuses the run: {error}; --wandb-mode offline needs no server"
        raise ConfigError([Problem("--use-wandb", True, remedy)]) from error


def write_samples(run_dir: Path, rollout_id: int, samples: list[dict[str, Any]]) -> None:
    """Append a few samples of a rollout to ``samples.txt``, for reading."""
    with (run_dir / SAMPLES_FILE).open("a", encoding="utf-8") as file:
        file.write(f"=== rollout {rollout_id} ===\n")
        for sample in samples:
            for key, value in sample.items():
                file.write(f"{key}: {value if isinstance(value, str) else json.dumps(value)}\n")
            file.write("\n")
