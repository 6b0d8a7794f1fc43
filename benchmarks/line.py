"""A run with SGLang, and what of each step is neither generating nor training; beside it plain
SGLang with the same requests, and copies to and from the device.

    python benchmarks/line.py --shape qwen3-0.6b --train-backend fsdp    # one accelerator
    python benchmarks/line.py --layout disaggregated                     # two: one trains
    python benchmarks/line.py --shape tiny                               # anywhere, to see it run

The model has random weights and every response full length. The table shows medians of the steps
after the warm-up; ``results.json`` has them too.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import in_process
from benchmarks.shapes import SHAPES, ShapeName, make_model
from miles.backends.sglang_utils.arguments import server_arguments
from miles.core import device
from miles.core.tracking import read_metrics
from miles.utils.arguments import read_config
from miles.utils.external_utils.command_utils import (
    ROOT,
    FlagValue,
    to_argv,
    with_values_joined,
    words_of,
)

if TYPE_CHECKING:
    from miles.rollout.engine_client import EngineClient

TIMEOUT_S = 900.0
PROMPT = "0123456789" * 6
REPEATS = 3
COPY_BYTES = 2**30


@dataclass(frozen=True)
class Benchmark:
    """Measure a run with SGLang."""

    shape: ShapeName = "qwen3-0.6b"
    """The model."""
    train_backend: Literal["fsdp", "megatron"] = "fsdp"
    """Training backend."""
    layout: Literal["colocated", "disaggregated"] = "colocated"
    """Whether trainer and engine take turns on one device or have one each."""
    num_prompts: int = 16
    """Prompts of a rollout."""
    num_samples: int = 8
    """Responses to each."""
    response_length: int = 512
    """Tokens of each response."""
    num_warmup: int = 2
    """Steps before those that count."""
    num_steps: int = 4
    """Steps that count."""
    max_tokens_per_gpu: int = 16_384
    """Tokens of a forward pass of the trainer."""
    plain: bool = True
    """Measure plain SGLang too, which starts one more server."""
    flags: str = ""
    """More flags of train.py, as on the command line: --flags "--sglang-page-size 16"."""
    folder: Path = Path("runs/benchmark/line")
    """Where the model and results.json go."""


def flags_of(options: Benchmark, model: Path) -> dict[str, FlagValue]:
    prompts = options.folder / "prompts.jsonl"
    rows = options.num_prompts * (options.num_warmup + options.num_steps)
    prompts.write_text(
        "".join(json.dumps({"input": f"{number} {PROMPT}"}) + "\n" for number in range(rows)),
        encoding="utf-8",
    )
    colocated = options.layout == "colocated"
    return {
        "train-backend": options.train_backend,
        "actor-num-gpus-per-node": 1,
        **({"colocate": True} if colocated else {"rollout-num-gpus": 1}),
        "rollout-engine": "sglang",
        "hf-checkpoint": model.resolve(),
        "prompt-data": prompts.resolve(),
        "custom-generate-function-path": "benchmarks.fixed_length.generate",
        "custom-rm-path": "benchmarks.fixed_length.reward",
        "custom-rollout-log-function-path": "benchmarks.fixed_length.rollout_log",
        "rollout-batch-size": options.num_prompts,
        "n-samples-per-prompt": options.num_samples,
        "rollout-max-response-len": options.response_length,
        "num-rollout": options.num_warmup + options.num_steps,
        "num-steps-per-rollout": 1,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": options.max_tokens_per_gpu,
        "lr": 1e-6,
    }


def run_miles(options: Benchmark, argv: list[str]) -> dict[str, float]:
    """Medians of the run's metrics."""
    run_dir = (options.folder / f"{options.layout}-{options.train_backend}").resolve()
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *argv, "--run-dir", str(run_dir)],
        check=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    rows = [row for row in read_metrics(run_dir) if row["step"] > options.num_warmup]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: statistics.median(row[name] for row in rows) for name in names}


def run_plain(options: Benchmark, argv: list[str]) -> float:
    """Tokens per second of a server that the same flags start, asked for the same responses."""
    config, _ = read_config(argv)
    with _server(options.folder, server_arguments(config, 0, 1)) as url:
        seconds = asyncio.run(_generate(options, url))
    return options.num_prompts * options.num_samples * options.response_length / seconds


async def _generate(options: Benchmark, url: str) -> float:
    """The median of some times, after one that does not count."""
    from miles.rollout.engine_client import EngineClient

    client = EngineClient(url, timeout_s=TIMEOUT_S)
    times: list[float] = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        requests = (_ask(client, options, repeat, i) for i in range(options.num_prompts))
        await asyncio.gather(*requests)
        times.append(time.perf_counter() - start)
    await client.close()
    return statistics.median(times[1:])


async def _ask(client: "EngineClient", options: Benchmark, repeat: int, number: int) -> None:
    from miles.contracts.engine import GenerateRequest, SamplingParams

    # Other prompts each time: none is in the cache.
    ids = (3 + repeat, 3 + number, *range(3, 3 + len(PROMPT)))
    params = SamplingParams(max_new_tokens=options.response_length, ignore_eos=True)
    await client.generate(GenerateRequest(input_ids=ids, params=params, n=options.num_samples))


@contextmanager
def _server(folder: Path, arguments: list[str]) -> Generator[str]:
    ready = folder.resolve() / "plain.ready"
    ready.unlink(missing_ok=True)
    module = "miles.backends.sglang_utils.server"
    own = ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with (folder / "plain.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, *own],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"plain SGLang did not start: {folder / 'plain.log'}")
            time.sleep(0.2)
        yield json.loads(ready.read_text(encoding="utf-8"))["url"]
    finally:
        process.terminate()
        process.wait(60)


def copy_bandwidth() -> dict[str, float]:
    """Bytes per second between pinned host memory and the device, each way; the limit of sleep and
    wake-up. Empty without an accelerator."""
    if not device.has_accelerator():
        return {}
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.current_device())
    rates: dict[str, float] = {}
    for name, target, source in (("to the host", host, there), ("to the device", there, host)):
        times: list[float] = []
        for _ in range(REPEATS + 1):
            device.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            device.synchronize()
            times.append(time.perf_counter() - start)
        rates[name] = COPY_BYTES / statistics.median(times[1:])
    return rates


def summary(
    options: Benchmark, found: Mapping[str, float], plain: float | None
) -> dict[str, float]:
    """What the table shows."""
    step, train = found["perf/step_time"], found["perf/train_time"]
    tokens = options.num_prompts * options.num_samples * options.response_length
    rollout = tokens / found["perf/generate_time"]
    sync = found["perf/update_weights_time"]
    moves = {name: value for name, value in found.items() if name.startswith("perf/offload/")}
    return {
        "step, s": step,
        "generating, s": found["perf/generate_time"],
        "training, s": train,
        "weight sync, s": sync,
        "weight sync, GB/s": 2 * SHAPES[options.shape].num_parameters / sync / 1e9,
        **{f"{name.removeprefix('perf/offload/')}, s": value for name, value in moves.items()},
        "neither generating nor training, %": 100
        * (1 - (found["perf/generate_time"] + train) / step),
        "rollout, tokens/s": rollout,
        **({} if plain is None else {"plain SGLang, tokens/s": plain, "/ plain": rollout / plain}),
        "mean log-prob difference": found["train/train_rollout_logprob_abs_diff"],
    }


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def main(options: Benchmark) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    # In a process of its own: this one must hold no memory of the device beside the run.
    model = in_process(make_model, options.folder / options.shape, SHAPES[options.shape])
    argv = [*to_argv(flags_of(options, model)), *words_of("--flags", options.flags)]
    found = run_miles(options, argv)
    shown = summary(options, found, run_plain(options, argv) if options.plain else None)
    rates = copy_bandwidth()
    title = f"{options.shape}, {options.train_backend}, {options.layout}"
    table = Table("", "median", title=title)
    for name, value in shown.items():
        table.add_row(name, f"{value:,.4g}")
    for name, value in rates.items():
        table.add_row(f"pinned copy {name}, GB/s", f"{value / 1e9:.1f}")
    Console().print(table)
    results = {"summary": shown, "metrics": found, "copies": rates}
    name = "-".join(("results", options.shape, options.train_backend, options.layout))
    (options.folder / f"{name}.json").write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, args=with_values_joined(sys.argv[1:], "--flags")))
