"""The run directory: config, metrics and samples of a run."""

import json
import uuid
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from miles.backends.training_utils import checkpoints
from miles.config.errors import ConfigError, Problem
from miles.config.record import write_record
from miles.config.root import MilesConfig
from miles.core.tracking import (
    METRICS_FILE,
    Tracker,
    TrackingError,
    WandbSettings,
    read_metrics,
)


def make_run_dir(config: MilesConfig) -> Path:
    """Create ``--run-dir`` (default ``runs/<time>``) and write the run's config there.

    Raises ``ConfigError``.
    """
    default = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = Path(config.observability.run_dir or default).resolve()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_record(run_dir, config)
    except OSError as error:
        problem = Problem("--run-dir", str(run_dir), f"cannot be written: {error}")
        raise ConfigError([problem]) from error
    return run_dir


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
    except ValueError:
        return False  # The run was killed while it wrote there.
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
    with (run_dir / "samples.txt").open("a", encoding="utf-8") as file:
        file.write(f"=== rollout {rollout_id} ===\n")
        for sample in samples:
            for key, value in sample.items():
                file.write(f"{key}: {value if isinstance(value, str) else json.dumps(value)}\n")
            file.write("\n")
