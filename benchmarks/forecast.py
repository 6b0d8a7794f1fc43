"""What ``miles.plan`` forecasts beside what a run takes, phase by phase.

    python benchmarks/forecast.py --shape qwen3-0.6b    # one accelerator
    python benchmarks/forecast.py --shape tiny          # anywhere, the checkpoint alone

A colocated run with SGLang, two steps long, that ends with a checkpoint. On the device: the most
that the trainer's PyTorch held in a phase (``perf/memory/*`` of ``metrics.jsonl``), and what the
engine's log tells. On the host: the most that the trainer's process held of its own. Contexts of
CUDA and communicators are no part of it.
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import line
from benchmarks.processes import in_process, resident_bytes
from benchmarks.shapes import SHAPES, ShapeName, make_model
from miles.core.tracking import read_metrics
from miles.rundir import LOGS_FOLDER
from miles.utils.external_utils.command_utils import (
    ROOT,
    FlagValue,
    to_argv,
    with_values_joined,
    words_of,
)

GIB = 2**30
POLL_S = 0.05
NOT_OF_THE_TRAINER = ("CUDA contexts", "communicators", "engine weights", "key/value cache")
PHASES = {"train": "train", "sync": "update_weights", "save": "save"}
"""The forecast's names, and those of the metrics."""


@dataclass(frozen=True)
class Benchmark:
    """Hold the forecast against a run."""

    shape: ShapeName = "qwen3-0.6b"
    """The model."""
    train_backend: Literal["fsdp", "megatron"] = "fsdp"
    """Training backend."""
    num_prompts: int = 8
    """Prompts of a rollout."""
    num_samples: int = 8
    """Responses to each."""
    response_length: int = 1024
    """Tokens of each response."""
    max_tokens_per_gpu: int = 16_384
    """Tokens of a forward pass of the trainer."""
    flags: str = ""
    """More flags of train.py, as on the command line."""
    folder: Path = Path("runs/benchmark/forecast")
    """Where the model, the run and its checkpoint go."""


@dataclass(frozen=True)
class Found:
    """Bytes (or tokens) that were forecast, and that were measured."""

    name: str
    forecast: float
    measured: float
    unit: Literal["GiB", "tokens"] = "GiB"


def make_argv(options: Benchmark, model: Path, run_dir: Path) -> list[str]:
    steps = line.Benchmark(
        shape=options.shape,
        train_backend=options.train_backend,
        num_prompts=options.num_prompts,
        num_samples=options.num_samples,
        response_length=options.response_length,
        num_warmup=1,
        num_steps=1,
        max_tokens_per_gpu=options.max_tokens_per_gpu,
        folder=options.folder,
    )
    own: dict[str, FlagValue] = {
        "save": run_dir / "checkpoints",
        "rollout-max-prompt-len": 128,
        "sglang-log-level": "info",
    }
    return [
        *to_argv({**line.flags_of(steps, model), **own}),
        *words_of("--flags", options.flags),
    ]


def forecast(argv: list[str]) -> list[dict[str, Any]]:
    """Of each phase on a trainer's rank. In a process of its own: this one must hold nothing of
    the device."""
    command = [sys.executable, "-m", "miles.plan", "--json", *argv]
    answer = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, timeout=line.TIMEOUT_S)
    if answer.returncode not in (0, 1):
        sys.exit(answer.returncode)
    return json.loads(answer.stdout)["phases"]


def run(argv: list[str], run_dir: Path) -> int:
    """Run ``train.py``; the most bytes of host memory of its trainer."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv, "--run-dir", str(run_dir)],
        env={**os.environ, "PYTHONPATH": line.python_path()},
    )
    most = 0
    deadline = time.monotonic() + line.TIMEOUT_S
    trainer: psutil.Process | None = None
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(psutil.Error, OSError):
            trainer = trainer or _trainer(psutil.Process(process.pid))
            if trainer is not None:
                most = max(most, resident_bytes(trainer.pid) or 0)
        time.sleep(POLL_S)
    if process.poll() is None:
        process.terminate()
    if process.wait(60) != 0:
        sys.exit("the run failed")
    return most


def _trainer(driver: psutil.Process) -> psutil.Process | None:
    """Ray names its processes after what they run."""
    for process in driver.children(recursive=True):
        with suppress(psutil.Error):
            if "TrainerProcess" in " ".join(process.cmdline()):
                return process
    return None


def of_the_engine(log: Path) -> dict[str, float]:
    """Weights in bytes, and tokens of the cache, as SGLang tells them where it does."""
    text = log.read_text(encoding="utf-8", errors="replace")
    weights = re.search(r"Load weight end.*mem usage=([\d.]+) GB", text)
    tokens = re.search(r"KV Cache is allocated.*#tokens: (\d+)", text)
    found: dict[str, float] = {}
    if weights is not None:
        found["engine weights"] = float(weights[1]) * GIB
    if tokens is not None:
        found["tokens"] = float(tokens[1])
    return found


def compare(phases: list[dict[str, Any]], host_bytes: int, run_dir: Path) -> list[Found]:
    metrics: dict[str, float] = {}
    for row in read_metrics(run_dir):
        metrics |= {k: max(v, metrics.get(k, 0.0)) for k, v in row.items()}
    rows: list[Found] = []
    for phase in phases:
        measured = metrics.get(f"perf/memory/{PHASES.get(phase['phase'])}_peak_gib")
        if measured is not None:
            ours = sum(
                entry["device"]
                for entry in phase["lines"]
                if not entry["component"].startswith(NOT_OF_THE_TRAINER)
            )
            rows.append(Found(f"device, {phase['phase']}", ours, measured * GIB))
    if rows:  # else the device is the host
        host = max(phase["sum"]["host"] for phase in phases)
        rows.append(Found("host, at most", host, host_bytes))
    written = sum(f.stat().st_size for f in (run_dir / "checkpoints").rglob("*") if f.is_file())
    planned = [
        entry["disk"]
        for phase in phases
        for entry in phase["lines"]
        if entry["component"] == "checkpoint"
    ]
    rows.append(Found("disk, checkpoint", planned[0], written))
    (log,) = (run_dir / LOGS_FOLDER).glob("engine_0*.log")
    told = of_the_engine(log)
    for entry in next(p for p in phases if p["phase"] == "rollout")["lines"]:
        name = entry["component"]
        if name == "engine weights" and name in told:
            rows.append(Found("device, engine weights", entry["device"], told[name]))
        if name.startswith("key/value cache") and "tokens" in told:
            tokens = int(re.sub(r"\D", "", name))
            rows.append(Found("key/value cache", tokens, told["tokens"], "tokens"))
    return rows


def show(options: Benchmark, rows: list[Found]) -> None:
    table = Table(
        "", "forecast", "measured", "ratio", title=f"{options.shape}, {options.train_backend}"
    )
    for row in rows:
        values = [row.forecast, row.measured]
        shown = [f"{v / GIB:.2f} GiB" if row.unit == "GiB" else f"{v:,.0f}" for v in values]
        table.add_row(
            row.name, *shown, f"{row.forecast / row.measured:.3f}" if row.measured else ""
        )
    Console().print(table)


def main(options: Benchmark) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    run_dir = (options.folder / options.train_backend).resolve()
    if run_dir.exists():
        sys.exit(f"{run_dir} is there already, of an earlier run; remove it, or give --folder")
    model = in_process(make_model, options.folder / options.shape, SHAPES[options.shape])
    argv = make_argv(options, model, run_dir)
    phases = forecast(argv)
    show(options, compare(phases, run(argv, run_dir), run_dir))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__, args=with_values_joined(sys.argv[1:], "--flags")))
