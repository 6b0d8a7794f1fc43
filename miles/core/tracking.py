"""Metrics of a run: always to ``metrics.jsonl``, by flag to TensorBoard and Weights & Biases."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.core import logging

METRICS_FILE = "metrics.jsonl"

log = logging.get(__name__)


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """How to reach Weights & Biases; passed to ``wandb.init``."""

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    dir: str | None = None
    run_id: str | None = None
    """A run of this id is continued when there is one."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


class TrackingError(RuntimeError):
    """Weights & Biases refuses the run. The message is its own."""


class MetricsError(ValueError):
    """A ``metrics.jsonl`` that cannot be read. The message names file and line."""


class Tracker:
    """Fans metrics out. One process of a run owns it.

    Raises ``OSError`` where nothing can be written, and ``TrackingError``."""

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard_dir: str | None = None,
        wandb: WandbSettings | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(tensorboard_dir)
        self._wandb = _start_wandb(wandb, run_dir) if wandb is not None else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` at ``step`` (number of completed rollouts)."""
        row = {"step": step, "time": time.time(), **{k: _plain(v) for k, v in metrics.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({**metrics, "step": step})

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One row for each step of a run's ``metrics.jsonl``, in order of steps.

    A step's metrics may come in several lines (before a save, after it, evaluation); of a name
    that occurs again, as in a run that was resumed, the last value counts. What a killed run left
    of its last line is left out, with a warning. Raises ``MetricsError``."""
    path = run_dir / METRICS_FILE
    rows: dict[int, dict[str, Any]] = {}
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        log.warning("%s: the last line was cut short and is left out", path)
    for number, line in enumerate(lines, 1):
        row = _read_row(line)
        if row is None:
            raise MetricsError(
                f"{path}, line {number}, is no row of metrics ({line[:40]!r}): remove that line"
            )
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _read_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line: the next one would be joined to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with path.open("r+b") as file:
            file.truncate(complete)


def _plain(value: float) -> float | None:
    """JSON has no NaN: what is not finite becomes null."""
    return float(value) if math.isfinite(value) else None


def _start_wandb(settings: WandbSettings, run_dir: Path) -> Any:
    import wandb

    try:
        run: Any = wandb.init(
            project=settings.project or "miles",
            entity=settings.entity,
            group=settings.group,
            mode=settings.mode,  # pyright: ignore[reportArgumentType]
            dir=settings.dir or str(run_dir),
            id=settings.run_id,
            resume="allow" if settings.run_id else None,
            config=dict(settings.config),
        )
    except wandb.Error as error:
        raise TrackingError(" ".join(str(error).split())) from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
