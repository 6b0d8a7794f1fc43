"""Tokens per second of whole training steps: the FSDP and the Megatron backend in one run.

    python benchmarks/train_step.py --shape qwen3-0.6b      # one accelerator
    python benchmarks/train_step.py --shape tiny            # anywhere, to see that it runs

Both get the same randomly initialised model, the same packed sequences and supervised loss on every
token, bf16 with fp32 masters. A step is forward, backward, gradient clipping and AdamW. Each
measurement has processes of its own; the table shows medians.
"""

import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import SHAPES, Shape, ShapeName, make_model
from miles.config.root import MilesConfig
from miles.contracts.types import Group, Prompt, Sample, Status, TrainBatch
from miles.core import device, distributed
from miles.rollout.batch import make_batches
from miles.utils.arguments import read_config
from miles.utils.external_utils.command_utils import (
    FlagValue,
    to_argv,
    with_values_joined,
    words_of,
)

BackendName = Literal["fsdp", "megatron"]
RESULT_TIMEOUT_S = 900.0
H200_BF16_FLOPS = 989e12
"""Dense, per second; NVIDIA's data sheet."""


@dataclass(frozen=True)
class Benchmark:
    """Measure whole training steps of both backends."""

    shape: ShapeName = "qwen3-0.6b"
    """The model."""
    backends: tuple[BackendName, ...] = ("fsdp", "megatron")
    """Which backends, in this order."""
    sequence_length: int = 4096
    """Tokens of a sequence."""
    tokens_per_step: int = 32_768
    """Tokens of an optimizer step over all ranks."""
    micro_batch_tokens: tuple[int, ...] = (4096, 8192, 16_384)
    """Tokens of a forward pass on each rank; all are tried."""
    num_ranks: int = 1
    """Trainer ranks, each with an accelerator of its own."""
    num_steps: int = 5
    """Steps that count."""
    num_warmup: int = 3
    """Steps before them."""
    fsdp_flags: str = ""
    """More flags for the FSDP backend, as on the command line."""
    megatron_flags: str = ""
    """More flags for the Megatron backend."""
    peak_flops: float = H200_BF16_FLOPS
    """Of one accelerator, for the share of it that is used (MFU)."""
    profile: bool = False
    """After each measurement print which kernels one more step takes its time in."""
    folder: Path = Path("runs/benchmark/train_step")
    """Where the model and results.json go."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    backend: str
    micro_batch_tokens: int
    seconds: float
    """Median of a step."""
    peak_bytes: int
    """Of PyTorch's allocator on rank 0."""


def make_config(
    options: Benchmark, backend: BackendName, micro_batch_tokens: int, model: Path
) -> MilesConfig:
    prompts = options.folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"input": "1", "label": "2"}) + "\n", encoding="utf-8")
    flags: dict[str, FlagValue] = {
        "train-backend": backend,
        "actor-num-gpus-per-node": options.num_ranks,
        "hf-checkpoint": model,
        "prompt-data": prompts,
        "label-key": "label",
        "loss-type": "sft_loss",
        "calculate-per-token-loss": True,
        "rollout-batch-size": options.tokens_per_step // options.sequence_length,
        "num-rollout": options.num_warmup + options.num_steps,
        "num-steps-per-rollout": 1,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": micro_batch_tokens,
        "lr": 1e-6,
    }
    more = options.fsdp_flags if backend == "fsdp" else options.megatron_flags
    config, _ = read_config([*to_argv(flags), *words_of(f"--{backend}-flags", more)])
    return config


def make_groups(options: Benchmark, shape: Shape) -> list[Group]:
    """Random sequences; every token but the first trains."""
    rng = np.random.default_rng(0)
    length = options.sequence_length
    groups: list[Group] = []
    for number in range(options.tokens_per_step // length):
        tokens = [int(token) for token in rng.integers(0, shape.vocab_size, length)]
        prompt = Prompt(group_id=number, text="", tokens=(tokens[0],))
        sample = Sample(
            prompt=prompt,
            index=number,
            tokens=tokens,
            response_length=length - 1,
            loss_mask=[1] * (length - 1),
            rollout_log_probs=[math.nan] * (length - 1),
            status=Status.COMPLETED,
            reward=0.0,
        )
        groups.append([sample])
    return groups


def train(
    rank: int, port: int, config: MilesConfig, groups: list[Group], profile: bool, results: Any
) -> None:
    """One trainer rank; rank 0 reports the seconds of each step and its peak memory."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(config.cluster.num_train_ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    from miles.ray.train.actor_factory import BACKENDS

    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    assert config.data.num_rollout is not None

    def step(number: int) -> float:
        shards: list[TrainBatch] = make_batches(groups, config, number, actor.parallel.dp_size)
        device.synchronize()
        start = time.perf_counter()
        actor.train(number, shards[actor.parallel.dp_rank])
        device.synchronize()
        return time.perf_counter() - start

    seconds = [step(number) for number in range(config.data.num_rollout)]
    peak_bytes = device.memory_stats().peak_bytes
    if profile and rank == 0:
        with torch.profiler.profile() as trace:
            taken = step(config.data.num_rollout)
        order = "device_time_total" if device.has_accelerator() else "cpu_time_total"
        print(f"a step of {taken:.3f} s, profiled")
        print(trace.key_averages().table(sort_by=f"self_{order}", row_limit=40), flush=True)
    elif profile:
        step(config.data.num_rollout)
    actor.shutdown()
    if rank == 0:
        results.put((seconds, peak_bytes))


def measure(options: Benchmark, config: MilesConfig, groups: list[Group]) -> Row:
    """Raises ``queue.Empty`` when the ranks report nothing in ``RESULT_TIMEOUT_S``."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    port = distributed.host_rendezvous("127.0.0.1")
    ranks = [
        context.Process(
            target=train, args=(rank, port, config, groups, options.profile, results), daemon=True
        )
        for rank in range(options.num_ranks)
    ]
    for process in ranks:
        process.start()
    seconds, peak_bytes = results.get(timeout=RESULT_TIMEOUT_S)
    for process in ranks:
        process.join(60)
    assert config.data.max_tokens_per_gpu is not None
    return Row(
        backend=config.cluster.train_backend,
        micro_batch_tokens=config.data.max_tokens_per_gpu,
        seconds=statistics.median(seconds[options.num_warmup :]),
        peak_bytes=peak_bytes,
    )


def table(rows: Sequence[Row], options: Benchmark) -> str:
    """Markdown."""
    flops = SHAPES[options.shape].flops_per_token(options.sequence_length)
    lines = [
        "| backend | tokens a pass | step s | tokens/s | MFU | peak GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        speed = options.tokens_per_step / row.seconds
        share = speed * flops / (options.num_ranks * options.peak_flops)
        lines.append(
            f"| {row.backend} | {row.micro_batch_tokens:,} | {row.seconds:.3f} | {speed:,.0f} | "
            f"{share:.3f} | {row.peak_bytes / 2**30:.1f} |"
        )
    return "\n".join(lines)


def main(options: Benchmark) -> None:
    shape = SHAPES[options.shape]
    options.folder.mkdir(parents=True, exist_ok=True)
    model = make_model((options.folder / options.shape).resolve(), shape)
    groups = make_groups(options, shape)
    rows: list[Row] = []
    for micro_batch_tokens in options.micro_batch_tokens:
        for backend in options.backends:
            config = make_config(options, backend, micro_batch_tokens, model)
            rows.append(measure(options, config, groups))
            print(rows[-1], flush=True)
    (options.folder / "results.json").write_text(json.dumps([vars(row) for row in rows], indent=2))
    print(
        f"\n{options.shape}: {options.tokens_per_step:,} tokens a step in sequences of "
        f"{options.sequence_length:,}, {options.num_ranks} rank(s), medians of "
        f"{options.num_steps} steps\n\n{table(rows, options)}"
    )


if __name__ == "__main__":
    given = with_values_joined(sys.argv[1:], "--fsdp-flags", "--megatron-flags")
    main(tyro.cli(Benchmark, description=__doc__, args=given))
