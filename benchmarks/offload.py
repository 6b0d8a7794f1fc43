"""Sleep, wake-up and streamed steps beside what the copy engine and the disk give in the same run.

    python benchmarks/offload.py --shape qwen3-4b --cases cpu           # one accelerator
    python benchmarks/offload.py --shape qwen3-0.6b --disk-dir /scratch # the same, with a disk
    python benchmarks/offload.py --shape small --sequence-length 64     # anywhere, the same code

The first moves 48 GB (FSDP) and 56 GB (Megatron) through as much pinned host memory; the second
writes at most 9 GB a sleep, and takes as long as the disk does. results.json holds every case that
has ended.

"rematerialized" is Megatron's --rematerialize-param-from-master-weight: it sleeps as after a weight
update, without a copy of its parameters, and makes them from the masters on waking.

Every case is one trainer process: it trains a step, then sleeps and wakes (the first cycle, which
pins memory or makes files, is a row of its own), then trains on. Ceilings: one large pinned copy
each way, and one into device memory that was just allocated, which the driver clears first; direct
I/O in pieces of the chunk, and reading and writing at the same time for the streamed step, on the
same disk. They are means of before and after the cases, because a disk varies by itself.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import train_step
from benchmarks.ceilings import Ceilings, mean_of, measure_ceilings, timed
from benchmarks.processes import in_process, resident_bytes
from benchmarks.shapes import SHAPES, Shape, ShapeName, make_model
from miles.backends.training_utils.streamed_optimizer import StreamedAdam
from miles.config.offload import OffloadConfig
from miles.config.root import MilesConfig
from miles.contracts.types import Group
from miles.core import device
from miles.rollout.batch import make_batches

Case = Literal["cpu", "rematerialized", "disk", "streamed", "streamed bf16"]
ON_HOST: tuple[Case, ...] = ("cpu", "rematerialized")
BackendName = Literal["fsdp", "megatron"]
GIB = 2**30


@dataclass(frozen=True)
class Benchmark:
    """Measure offloading of both backends."""

    shape: ShapeName = "qwen3-0.6b"
    """The model."""
    backends: tuple[BackendName, ...] = ("fsdp", "megatron")
    """Which backends, in this order."""
    cases: tuple[Case, ...] = ("cpu", "disk", "streamed", "streamed bf16")
    """Where the state lies: asleep in host memory or on disk, or on disk always."""
    disk_dir: Path = Path("runs/benchmark/offload/disk")
    """On the disk that is measured."""
    chunk_mb: int = 256
    """``--offload-train-disk-chunk-mb``."""
    ceiling_mb: int = 4096
    """MiB of each raw transfer."""
    sequence_length: int = 1024
    """Tokens of a sequence, two of which are a step."""
    num_cycles: int = 2
    """Cycles, and steps, after the first."""
    megatron_flags: str = ""
    """More flags for the Megatron backend."""
    folder: Path = Path("runs/benchmark/offload")
    """Where the model and results.json go."""


@dataclass
class Measured:
    """One case; seconds are medians of what follows the first."""

    backend: str
    case: Case
    state_bytes: int = 0
    """That leave the device in a sleep."""
    streamed_bytes: int = 0
    """Of the optimizer's state on disk."""
    first_sleep_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    step_s: float = 0.0
    update_s: float = 0.0
    """Of the step: bringing in, updating and writing back the streamed state."""
    peak_bytes: int = 0
    """On the device, in a step."""
    awake_bytes: int = 0
    """On the device, that PyTorch holds; likewise the next."""
    asleep_bytes: int = 0
    left_bytes: int = 0
    """Of the device's memory, asleep: what is not free of what was before the actor was built; with
    contexts of CUDA and NCCL."""
    pinned_bytes: int = 0
    """Host memory for the device's copies, asleep."""
    resident_bytes: int | None = None
    """Host memory of the process, asleep, without mapped files; unknown where the system does not
    tell."""


def make_config(options: Benchmark, backend: BackendName, case: Case, model: Path) -> MilesConfig:
    steps = train_step.Benchmark(
        shape=options.shape,
        sequence_length=options.sequence_length,
        tokens_per_step=2 * options.sequence_length,
        num_steps=options.num_cycles + 1,
        num_warmup=0,
        megatron_flags=options.megatron_flags,
        folder=options.folder,
    )
    config = train_step.make_config(steps, backend, options.sequence_length, model)
    # Not by flags, which ask for engines that the trainer makes room for.
    offload = OffloadConfig(
        offload_train=True,
        offload_train_target="cpu" if case in ON_HOST else "disk",
        offload_train_disk_dir=str(options.disk_dir),
        offload_train_disk_chunk_mb=options.chunk_mb,
        rematerialize_param_from_master_weight=case == "rematerialized",
        stream_optimizer_state_to_disk=case.startswith("streamed"),
        stream_optimizer_state_moment_dtype="bf16" if case == "streamed bf16" else "fp32",
    )
    return replace(config, offload=offload)


def disk_bytes(shape: Shape, backend: BackendName, case: Case) -> int:
    """That a case writes to files: asleep, the state; masters are FSDP's parameters."""
    if case in ON_HOST:
        return 0
    parameter_and_master = {"fsdp": 4, "megatron": 2 + 4}[backend]
    moments = 4 if case == "streamed bf16" else 8
    return shape.num_parameters * (parameter_and_master + moments)


def require_room(options: Benchmark) -> None:
    """Exit where the disk is too small for one of the cases, which follow one another."""
    shape = SHAPES[options.shape]
    needed = {
        f"{backend}, {case}": disk_bytes(shape, backend, case)
        for backend in options.backends
        for case in options.cases
    }
    needed["the ceilings"] = 2 * options.ceiling_mb << 20
    options.disk_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.disk_dir).free
    small = [f"{n / 1e9:.1f} GB for {name}" for name, n in needed.items() if n > free]
    if small:
        raise SystemExit(
            f"--disk-dir {options.disk_dir}: {free / 1e9:.1f} GB are free, but {'; '.join(small)} "
            "are needed: give a larger disk, a smaller --shape, or --ceiling-mb"
        )


def run_case(config: MilesConfig, groups: list[Group], case: Case) -> Measured:
    """In the trainer's process."""
    from miles.ray.train.actor_factory import BACKENDS

    measured = Measured(config.cluster.train_backend, case)
    spans: list[float] = []
    update = StreamedAdam.step

    def timed_update(self: StreamedAdam) -> None:
        spans.append(timed(lambda: update(self)))

    StreamedAdam.step = timed_update
    device.bind(0)
    before = device.used_bytes()
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)

    def step(number: int) -> float:
        (batch,) = make_batches(groups, config, number, 1)
        return timed(lambda: actor.train(number, batch))

    step(0)
    measured.state_bytes = _kept_bytes(actor)
    device.empty_cache()
    measured.awake_bytes = device.memory_stats().reserved_bytes
    sleeps: list[float] = []
    wakes: list[float] = []
    for _ in range(config.data.num_rollout or 1):
        sleeps.append(timed(lambda: _sleep(actor, case)))
        measured.asleep_bytes = device.memory_stats().reserved_bytes
        measured.left_bytes = device.used_bytes() - before
        measured.pinned_bytes = device.pinned_bytes()
        measured.resident_bytes = resident_bytes()
        wakes.append(timed(actor.wake_up))
    measured.first_sleep_s = sleeps[0]
    measured.sleep_s = statistics.median(sleeps[1:] or sleeps)
    measured.wake_s = statistics.median(wakes[1:] or wakes)
    spans.clear()
    if device.has_accelerator():
        torch.accelerator.reset_peak_memory_stats()
    measured.step_s = statistics.median(
        [step(number) for number in range(1, config.data.num_rollout or 2)]
    )
    measured.peak_bytes = device.memory_stats().peak_bytes
    measured.update_s = statistics.median(spans) if spans else 0.0
    measured.streamed_bytes = sum(state.num_bytes for state in _states(actor))
    actor.shutdown()
    return measured


def _sleep(actor: Any, case: Case) -> None:
    if case == "rematerialized":
        actor.sleep(keep_weights=True)  # for the weight update that may come between
    actor.sleep()


def _kept_bytes(actor: Any) -> int:
    """Of what survives a sleep, without what is made anew."""
    store = actor.ops.store
    kept = _storages(store.tensors())
    return sum(kept.values()) - sum(_storages(store._derived()).values())


def _storages(tensors: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    from miles.backends.training_utils.offload_store import local_tensor

    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors.values()]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _states(actor: Any) -> list[Any]:
    streamed = actor.ops.optimizer._streamed
    if streamed is None:
        return []
    parts = [streamed] if isinstance(streamed, StreamedAdam) else [s._adam for s in streamed]
    return [state for part in parts for state in part.states]


def tables(ceilings: Ceilings, rows: Sequence[Measured]) -> str:
    """Markdown."""
    limits = {name: f"{speed / 1e9:.2f}" for name, speed in asdict(ceilings).items()}
    lines = [
        "ceilings in GB/s: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in limits.items()),
        "",
        "| backend | state | GB moved | first sleep s | sleep s | of ceiling | wake s | of ceiling "
        "| with clearing | device GB awake, asleep, all asleep | host GB asleep: pinned, all |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        out, back = (
            (ceilings.to_host, ceilings.to_device)
            if row.case in ON_HOST
            else (ceilings.write, ceilings.read)
        )
        size = row.state_bytes
        cleared = 1 / ceilings.to_new_memory - 1 / ceilings.to_device
        possible = size / ceilings.to_device + row.awake_bytes * cleared
        new = f"{possible / row.wake_s:.2f}" if row.case in ON_HOST else ""
        other = row.resident_bytes
        resident = "unknown" if other is None else f"{other / 1e9:.2f}"
        lines.append(
            f"| {row.backend} | {row.case} | {size / 1e9:.2f} | {row.first_sleep_s:.3f} "
            f"| {row.sleep_s:.3f} | {size / row.sleep_s / out:.2f} "
            f"| {row.wake_s:.3f} | {size / row.wake_s / back:.2f} | {new} "
            f"| {row.awake_bytes / 1e9:.2f}, {row.asleep_bytes / 1e9:.2f}, "
            f"{row.left_bytes / 1e9:.2f} | {row.pinned_bytes / 1e9:.2f}, {resident} |"
        )
    lines += [
        "",
        "| backend | state | step s | of it streaming s | GB streamed each way "
        "| disk alone s | streaming / disk | peak device GB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        alone = row.streamed_bytes / ceilings.write_beside_read
        ratio = f"{row.update_s / alone:.2f}" if alone else ""
        lines.append(
            f"| {row.backend} | {row.case} | {row.step_s:.3f} | {row.update_s:.3f} "
            f"| {row.streamed_bytes / 1e9:.2f} | {alone:.3f} | {ratio} "
            f"| {row.peak_bytes / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main(options: Benchmark) -> None:
    if "rematerialized" in options.cases and "fsdp" in options.backends:
        raise SystemExit(
            "--cases rematerialized: FSDP's parameters are masters; --backends megatron"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    # In a process of its own, as everything else: this one holds no memory of the device.
    model = in_process(
        make_model, (options.folder / options.shape).resolve(), SHAPES[options.shape]
    )
    require_room(options)
    groups = train_step.make_groups(
        train_step.Benchmark(
            sequence_length=options.sequence_length, tokens_per_step=2 * options.sequence_length
        ),
        SHAPES[options.shape],
    )
    measured: list[Ceilings] = []
    rows: list[Measured] = []

    def measure() -> None:
        sizes = (options.ceiling_mb << 20, options.chunk_mb << 20)
        measured.append(in_process(measure_ceilings, options.disk_dir, *sizes))
        print(measured[-1], flush=True)

    def save() -> None:
        results = {"ceilings": list(map(asdict, measured)), "rows": list(map(asdict, rows))}
        (options.folder / "results.json").write_text(json.dumps(results, indent=2))

    measure()
    for backend in options.backends:
        for case in options.cases:
            config = make_config(options, backend, case, model)
            rows.append(in_process(run_case, config, groups, case))
            print(rows[-1], flush=True)
            save()
    measure()
    save()
    ceilings = mean_of(measured)
    print(
        f"\n{options.shape}, one rank, chunks of {options.chunk_mb} MiB, medians of "
        f"{options.num_cycles} after the first\n\n{tables(ceilings, rows)}"
    )


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
