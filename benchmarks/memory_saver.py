"""Sleep and wake-up by emptied storages (what trainers do) beside torch_memory_saver.

    python benchmarks/memory_saver.py --shape qwen3-0.6b      # one CUDA device

Both move the same tensors, an fp32 parameter and two moments for each of a model's, to pinned host
memory and back. `--methods storages` runs anywhere.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ceilings import timed
from benchmarks.processes import in_process
from benchmarks.shapes import SHAPES, Shape, ShapeName, make_config
from miles.backends.training_utils.offload_backing import HostBacking
from miles.backends.training_utils.offload_store import OffloadStore
from miles.core import device

Method = Literal["storages", "memory saver"]
Tensors = dict[str, torch.Tensor]
TAG = "state"


@dataclass(frozen=True)
class Benchmark:
    """Compare two ways to free a trainer's memory."""

    shape: ShapeName = "qwen3-0.6b"
    """The model."""
    methods: tuple[Method, ...] = ("storages", "memory saver")
    """Each in a process of its own."""
    num_cycles: int = 4
    """After the first, which pins memory."""


@dataclass(frozen=True)
class Measured:
    """Seconds; medians of what follows the first cycle."""

    method: Method
    state_bytes: int
    first_sleep_s: float
    sleep_s: float
    wake_s: float
    left_bytes: int
    """On the device, asleep, of what it took awake."""


def make_state(shape: Shape) -> Tensors:
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(make_config(shape))
    return {
        f"{kind}.{name}": torch.rand(parameter.shape, device=device.current_device())
        for name, parameter in model.named_parameters()
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
    }


def by_storages(shape: Shape) -> tuple[Tensors, Callable[[], None], Callable[[], None]]:
    tensors = make_state(shape)
    store = OffloadStore(HostBacking(), weights=lambda: tensors)
    return tensors, store.sleep, store.wake_up


def by_memory_saver(shape: Shape) -> tuple[Tensors, Callable[[], None], Callable[[], None]]:
    from torch_memory_saver import (  # pyright: ignore[reportMissingImports]
        torch_memory_saver,  # pyright: ignore[reportUnknownVariableType]
    )

    saver: Any = torch_memory_saver
    saver.hook_mode = "torch"
    with saver.region(tag=TAG, enable_cpu_backup=True):
        tensors = make_state(shape)
    return tensors, lambda: saver.pause(TAG), lambda: saver.resume(TAG)


def run(method: Method, shape: Shape, num_cycles: int) -> Measured:
    device.bind(0)
    # Not PyTorch's counts: torch_memory_saver works below them.
    before = device.used_bytes()
    ways = {"storages": by_storages, "memory saver": by_memory_saver}
    tensors, sleep, wake_up = ways[method](shape)
    expected = {name: int(tensor.view(torch.int32).sum()) for name, tensor in tensors.items()}
    sleeps: list[float] = []
    wakes: list[float] = []
    left = 0
    for _ in range(num_cycles + 1):
        sleeps.append(timed(sleep))
        left = device.used_bytes() - before
        time.sleep(0.2)
        wakes.append(timed(wake_up))
    for name, tensor in tensors.items():
        assert int(tensor.view(torch.int32).sum()) == expected[name], f"{method} changed {name}"
    return Measured(
        method=method,
        state_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        first_sleep_s=sleeps[0],
        sleep_s=statistics.median(sleeps[1:]),
        wake_s=statistics.median(wakes[1:]),
        left_bytes=left,
    )


def table(rows: list[Measured]) -> str:
    """Markdown."""
    lines = [
        "| method | GB | first sleep s | sleep s | GB/s | wake s | GB/s | left on the device GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        size = row.state_bytes / 1e9
        lines.append(
            f"| {row.method} | {size:.2f} | {row.first_sleep_s:.2f} | {row.sleep_s:.3f} "
            f"| {size / row.sleep_s:.1f} | {row.wake_s:.3f} | {size / row.wake_s:.1f} "
            f"| {row.left_bytes / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main(options: Benchmark) -> None:
    shape = SHAPES[options.shape]
    rows = [in_process(run, method, shape, options.num_cycles) for method in options.methods]
    print(table(rows))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
