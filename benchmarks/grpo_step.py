"""A whole GRPO step of Miles against TRL's ``GRPOTrainer``: same model, prompts, batch, lengths.

Run ``python benchmarks/grpo_step.py --workload smollm2``. Both sides get the same two cores, one
after the other. See ``benchmarks/README.md`` for what is counted where.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import WORKLOADS, Workload, WorkloadName
from miles.core.tracking import read_metrics
from miles.utils.external_utils.command_utils import FlagValue, to_argv
from scripts.smollm2 import DtypeName

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.*"
SHARED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
TRAINER_SPANS = ("ref_log_probs", "log_probs", "advantages", "optimizer_steps")
COLUMNS = ("step", "generate", "train", "outside")
NUM_CORES = 2
RUN_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Benchmark:
    """Measure whole GRPO steps."""

    workload: WorkloadName
    """SmolLM2-135M, 8 prompts x 8 samples of 46 + 24 tokens; or the demo model, 32 x 16."""
    num_steps: int = 6
    """Steps that count."""
    num_warmup: int = 2
    """Steps before them."""
    dtypes: tuple[DtypeName, ...] = ("fp32", "bf16")
    """What Miles is run in; TRL always in fp32."""
    num_ranks: int = 1
    """Trainer ranks of Miles, which share the two cores."""
    micro_batch_size: int | None = None
    """Samples of a forward pass of Miles, on each rank; by default the workload's."""
    trl_micro_batch_size: int | None = None
    """The same for TRL."""
    with_trl: bool = True
    """Run TRL too."""
    folder: Path = Path("runs/benchmark")
    """Where models, prompts, runs and results.json go."""
    trl_venv: Path = ROOT / ".bench-venv"
    """TRL's environment; made when it is missing."""


Row = Mapping[str, float]


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a child on the benchmark's cores. Raises ``subprocess.CalledProcessError``."""
    print(f"$ {' '.join(command)}", flush=True)
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment}
    subprocess.run(command, check=True, env=env, cwd=ROOT, timeout=RUN_TIMEOUT_S)


def make_trl_venv(folder: Path) -> Path:
    """Return the interpreter of TRL's environment, with the versions of ``constraints.txt``."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if not stamp.exists():
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        shared = [pin for pin in pins if pin.split("==")[0] in SHARED_PACKAGES]
        venv.create(folder, with_pip=True, clear=True)
        run([str(python), "-m", "pip", "install", "--quiet", TRL, *shared], {})
        stamp.touch()
    return python


def run_trl(options: Benchmark, workload: Workload, folder: Path) -> list[Row]:
    python = make_trl_venv(options.trl_venv)
    out = folder / "trl.json"
    flags: dict[str, FlagValue] = {
        "model": workload.make_model(folder, "fp32"),
        "prompts": folder / "prompts.jsonl",
        "out": out,
        "num-prompts": workload.num_prompts,
        "num-samples": workload.num_samples,
        "response-length": workload.response_length,
        "num-steps": options.num_warmup + options.num_steps,
        "micro-batch-size": options.trl_micro_batch_size or workload.trl_micro_batch_size,
        "num-threads": NUM_CORES,
    }
    script = str(ROOT / "benchmarks" / "trl_step.py")
    run([str(python), script, *to_argv(flags)], {"OMP_NUM_THREADS": str(NUM_CORES)})
    return json.loads(out.read_text())["steps"]


def miles_flags(options: Benchmark, workload: Workload, folder: Path) -> dict[str, FlagValue]:
    hooks = "benchmarks.fixed_length"
    return {
        "train-backend": "fsdp",
        "actor-num-gpus-per-node": options.num_ranks,
        "rollout-num-gpus": 1,
        "rollout-engine": "embedded",
        "prompt-data": folder / "prompts.jsonl",
        "custom-generate-function-path": f"{hooks}.generate",
        "custom-rm-path": f"{hooks}.reward",
        "custom-rollout-log-function-path": f"{hooks}.rollout_log",
        "rollout-batch-size": workload.num_prompts,
        "n-samples-per-prompt": workload.num_samples,
        "rollout-max-response-len": workload.response_length,
        "num-steps-per-rollout": 1,
        "micro-batch-size": options.micro_batch_size or workload.micro_batch_size,
        "num-rollout": options.num_warmup + options.num_steps,
        "lr": 1e-5,
    }


def run_miles(options: Benchmark, workload: Workload, folder: Path, dtype: DtypeName) -> list[Row]:
    run_dir = folder / f"miles-{dtype}"
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    flags = {
        **miles_flags(options, workload, folder),
        "hf-checkpoint": workload.make_model(folder, dtype),
        "fp32": dtype == "fp32",
        "run-dir": run_dir,
    }
    run([sys.executable, str(ROOT / "train.py"), *to_argv(flags)], {})
    return [miles_row(row) for row in read_metrics(run_dir) if "perf/step_time" in row]


def miles_row(metrics: Mapping[str, Any]) -> Row:
    """Seconds of one step; ``outside`` is what neither an engine nor a trainer computed in."""
    train = sum(metrics.get(f"perf/{span}_time", 0.0) for span in TRAINER_SPANS)
    step, generate = metrics["perf/step_time"], metrics["perf/generate_time"]
    return {
        "step": step,
        "generate": generate,
        "train": train,
        "outside": step - generate - train,
        "sync": metrics["perf/update_weights_time"],
    }


def medians(rows: Sequence[Row], num_warmup: int) -> dict[str, float]:
    """Of each column after the warm-up steps. Raises ``ValueError`` when none is left."""
    counted = rows[num_warmup:]
    if not counted:
        raise ValueError(f"{len(rows)} steps, all of them warm-up")
    return {name: statistics.median(row[name] for row in counted) for name in counted[0]}


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: one line a system; the ratio is TRL's step over its own."""
    head = ["", *(f"{name} s" for name in COLUMNS), "outside %", "times TRL's speed"]
    lines = [" | ".join(head), "|".join(["---"] + ["---:"] * (len(head) - 1))]
    trl = results.get("TRL fp32")
    for name, row in results.items():
        cells = [f"{row[column]:.2f}" if column in row else "" for column in COLUMNS]
        share = f"{100 * row['outside'] / row['step']:.1f}" if "outside" in row else ""
        ratio = f"{trl['step'] / row['step']:.2f}" if trl is not None else ""
        lines.append(" | ".join([name, *cells, share, ratio]))
    return "\n".join(f"| {line} |" for line in lines)


def main(options: Benchmark) -> None:
    workload = WORKLOADS[options.workload]
    folder = (options.folder / options.workload).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    num_rows = workload.num_prompts * (options.num_warmup + options.num_steps)
    workload.make_prompts(folder / "prompts.jsonl", num_rows)
    load = os.getloadavg()[0]
    rows: dict[str, list[Row]] = {}
    if options.with_trl:
        rows["TRL fp32"] = run_trl(options, workload, folder)
    for dtype in options.dtypes:
        rows[f"Miles {dtype}"] = run_miles(options, workload, folder, dtype)
    results = {name: medians(steps, options.num_warmup) for name, steps in rows.items()}
    (folder / "results.json").write_text(json.dumps({"medians": results, "steps": rows}, indent=2))
    print(
        f"\n{options.workload}: {workload.num_prompts} prompts x {workload.num_samples} samples of "
        f"{workload.prompt_length} + {workload.response_length} tokens; medians of "
        f"{options.num_steps} steps on {NUM_CORES} cores ({platform.processor() or 'CPU'}, load "
        f"{load:.1f} before the start)\n\n{table(results)}"
    )


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
