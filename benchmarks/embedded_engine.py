"""Tokens per second of engines on this machine's cores beside transformers' ``generate()``, in one
run.

All get the same model, prompts, lengths and threads, take turns, and the table shows medians.
Engines are measured through their HTTP client and return log-probs, which ``generate()`` does not.
A static batch runs until its longest sequence is done; only the tokens asked for are counted.

    python benchmarks/embedded_engine.py [--model DIR] [--threads 2] [--repeats 5]
    python benchmarks/embedded_engine.py --engines embedded sglang    # after make sglang-cpu
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from miles.rollout.engine_client import EngineClient

GENERATE = "generate()"
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """``num_prompts`` prompts, each with ``n`` samples; sample lengths spread over a range."""

    name: str
    num_prompts: int
    n: int
    prompt_tokens: int
    shortest: int
    longest: int

    @property
    def lengths(self) -> list[int]:
        """New tokens of each prompt's samples."""
        steps = max(1, self.num_prompts - 1)
        return [
            self.shortest + (self.longest - self.shortest) * i // steps
            for i in range(self.num_prompts)
        ]

    @property
    def num_tokens(self) -> int:
        return self.n * sum(self.lengths)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        return [
            [(7 * i + 3 * j) % (vocab_size - 8) + 4 for j in range(self.prompt_tokens)]
            for i in range(self.num_prompts)
        ]


@dataclass(frozen=True)
class Result:
    """Medians by who generated, in seconds."""

    case: Case
    seconds: Mapping[str, float]


def main() -> None:
    args = parse_args()
    # Read when torch is first imported; for both sides, and as a job starts its engines.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory() as folder:
        models = {args.model.name: args.model} if args.model else make_models(Path(folder))
        for name, path in models.items():
            cases = [
                Case("equal lengths", 64, 1, 46, args.new_tokens, args.new_tokens),
                Case("lengths vary 4x", 64, 1, 46, args.new_tokens // 4, args.new_tokens),
                Case("8 prompts x 8 samples", 8, 8, 46, args.new_tokens, args.new_tokens),
            ]
            if name == "demo":
                cases.append(Case("32 prompts x 16 samples", 32, 16, 7, 6, 6))
            show(name, args, *compare(path, cases, args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="Hugging Face directory; default: made models")
    parser.add_argument(
        "--engines", nargs="+", choices=["embedded", "sglang"], default=["embedded"]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64, help="of the longest sample")
    return parser.parse_args()


def make_models(folder: Path) -> dict[str, Path]:
    """0.4M and 22M parameters."""
    from scripts.made_models import make_qwen3

    demo = make_qwen3(
        folder / "demo", hidden_size=128, intermediate_size=384, num_layers=2, head_dim=32
    )
    small = make_qwen3(
        folder / "small",
        hidden_size=512,
        intermediate_size=1536,
        num_layers=7,
        num_heads=8,
        head_dim=64,
    )
    return {"demo": demo, "small": small}


def compare(
    path: Path, cases: Sequence[Case], args: argparse.Namespace
) -> tuple[list[Result], dict[str, int]]:
    """Medians of alternating runs, and the memory of each engine in the end, in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from miles.rollout.engine_client import EngineClient

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    model.generation_config.eos_token_id = None  # every sample gets its full length
    gc.collect()
    gc.freeze()  # as the rollout manager does
    results: list[Result] = []
    with ExitStack() as servers, asyncio.Runner() as runner:
        engines = {name: servers.enter_context(engine_server(name, path)) for name in args.engines}
        clients = {
            name: EngineClient(url, timeout_s=CALL_TIMEOUT_S) for name, (url, _) in engines.items()
        }
        for case in cases:
            prompts = case.prompts(model.config.vocab_size)
            seconds: dict[str, list[float]] = {name: [] for name in (GENERATE, *clients)}
            for _ in range(args.repeats + 1):
                seconds[GENERATE].append(run_generate(model, prompts, case))
                for name, client in clients.items():
                    seconds[name].append(runner.run(run_engine(client, prompts, case)))
            # The first ones warmed up.
            medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
            results.append(Result(case, medians))
        memory = {name: tree_bytes(pid) for name, (_, pid) in engines.items()}
        for client in clients.values():
            runner.run(client.close())
    return results, memory


def run_generate(model: Any, prompts: list[list[int]], case: Case) -> float:
    import torch

    ids = torch.tensor(prompts)
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=case.longest,
        num_return_sequences=case.n,
    )
    elapsed = time.perf_counter() - start
    assert output.shape == (case.num_prompts * case.n, case.prompt_tokens + case.longest)
    return elapsed


async def run_engine(client: "EngineClient", prompts: list[list[int]], case: Case) -> float:
    from miles.contracts.engine import GenerateRequest, SamplingParams

    requests = [
        GenerateRequest(
            input_ids=ids, params=SamplingParams(max_new_tokens=length, ignore_eos=True), n=case.n
        )
        for ids, length in zip(prompts, case.lengths, strict=True)
    ]
    start = time.perf_counter()
    answers = await asyncio.gather(*map(client.generate, requests))
    elapsed = time.perf_counter() - start
    assert sum(len(c.output_ids) for answer in answers for c in answer) == case.num_tokens
    return elapsed


def server_command(name: str, path: Path) -> list[str]:
    """As a job starts it."""
    if name == "embedded":
        return ["miles.backends.embedded.server", "--model-path", str(path)]
    from miles.backends.sglang_utils.arguments import server_arguments
    from miles.config.root import MilesConfig

    config = MilesConfig()
    config = replace(config, rollout=replace(config.rollout, hf_checkpoint=str(path)))
    return ["miles.backends.sglang_utils.server", *server_arguments(config, 0, 1)]


def tree_bytes(pid: int) -> int:
    """Memory of a process and its children that nobody else has."""
    process = psutil.Process(pid)
    return sum(p.memory_full_info().uss for p in (process, *process.children(recursive=True)))


@contextmanager
def engine_server(name: str, path: Path) -> Generator[tuple[str, int]]:
    """Its URL and process id."""
    with tempfile.TemporaryDirectory() as folder:
        ready, output = Path(folder) / "ready", Path(folder) / "log"
        own = ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *server_command(name, path), *own], stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine did not start:\n{output.read_text()}")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], process.pid
        finally:
            process.terminate()
            process.wait(30)


def show(
    name: str, args: argparse.Namespace, results: Sequence[Result], memory: Mapping[str, int]
) -> None:
    load = os.getloadavg()[0]
    title = f"{name}: tokens/s, {args.threads} threads, median of {args.repeats} (load {load:.1f})"
    ratios = [f"{engine} / {GENERATE}" for engine in memory]
    table = Table("case", "tokens", GENERATE, *memory, *ratios, title=title)
    for result in results:
        speeds = [result.case.num_tokens / result.seconds[side] for side in (GENERATE, *memory)]
        ratio = [f"{result.seconds[GENERATE] / result.seconds[engine]:.2f}" for engine in memory]
        cells = (str(result.case.num_tokens), *(f"{s:,.0f}" for s in speeds), *ratio)
        table.add_row(result.case.name, *cells)
    Console().print(table)
    print(", ".join(f"{engine}: {size / 2**30:.2f} GiB" for engine, size in memory.items()))


if __name__ == "__main__":
    main()
