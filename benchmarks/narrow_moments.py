"""What bf16 moments of a streamed optimizer change in training.

    python benchmarks/narrow_moments.py --disk-dir /scratch    # anywhere

The same model learns to reverse four digits from the same examples, once with fp32 and once with
bf16 moments on disk; the first is bit for bit a run with resident state. The table has the loss at
both ends, and how far the trained weights are apart beside how far training has moved them.
"""

import dataclasses
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import train_step
from benchmarks.processes import in_process
from benchmarks.shapes import SHAPES, ShapeName, make_model
from miles.config.root import MilesConfig
from miles.contracts.types import Group, Prompt, Sample, Status
from miles.rollout.batch import make_batches

Moments = Literal["fp32", "bf16"]
Weights = dict[str, Any]
"""Arrays by name, fp32."""
FIRST_DIGIT, EQUALS, END = 4, 14, 1
"""Token ids."""
NUM_DIGITS = 4
ENDS = 20


@dataclass(frozen=True)
class Benchmark:
    """Compare training with fp32 and with bf16 moments."""

    shape: ShapeName = "tiny"
    """The model."""
    backends: tuple[train_step.BackendName, ...] = ("fsdp", "megatron")
    """Which backends, in this order."""
    num_steps: int = 400
    """Optimizer steps."""
    batch_size: int = 128
    """Examples of each."""
    lr: float = 2e-3
    """Learning rate."""
    disk_dir: Path = Path("runs/benchmark/narrow_moments/disk")
    """Where the optimizer's state lies."""
    folder: Path = Path("runs/benchmark/narrow_moments")
    """Where the model goes."""


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    before: Weights
    after: Weights


def make_config(
    options: Benchmark, backend: train_step.BackendName, moments: Moments, model: Path
) -> MilesConfig:
    length = 2 * NUM_DIGITS + 2
    steps = train_step.Benchmark(
        shape=options.shape,
        sequence_length=length,
        tokens_per_step=length * options.batch_size,
        num_steps=options.num_steps,
        num_warmup=0,
        folder=options.folder,
    )
    config = train_step.make_config(steps, backend, length * options.batch_size, model)
    options.disk_dir.mkdir(parents=True, exist_ok=True)
    offload = dataclasses.replace(
        config.offload,
        offload_train=True,
        offload_train_target="disk",
        offload_train_disk_dir=str(options.disk_dir.resolve()),
        stream_optimizer_state_to_disk=True,
        stream_optimizer_state_moment_dtype=moments,
    )
    optimizer = dataclasses.replace(config.optimizer, lr=options.lr)
    return dataclasses.replace(config, offload=offload, optimizer=optimizer)


def make_groups(step: int, batch_size: int) -> list[Group]:
    """Examples of one step: the digits reversed, and the end."""
    rng = np.random.default_rng(step)
    groups: list[Group] = []
    for number in range(batch_size):
        digits = [FIRST_DIGIT + int(digit) for digit in rng.integers(0, 10, NUM_DIGITS)]
        answer = [*reversed(digits), END]
        prompt = Prompt(group_id=number, text="", tokens=(*digits, EQUALS))
        sample = Sample(
            prompt=prompt,
            index=number,
            tokens=[*prompt.tokens, *answer],
            response_length=len(answer),
            loss_mask=[1] * len(answer),
            rollout_log_probs=[math.nan] * len(answer),
            status=Status.COMPLETED,
            reward=0.0,
        )
        groups.append([sample])
    return groups


def train(config: MilesConfig, batch_size: int) -> Trained:
    """In the trainer's process."""
    from miles.ray.train.actor_factory import BACKENDS

    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    before = _weights(actor)
    losses: list[float] = []
    for step in range(config.data.num_rollout or 0):
        (batch,) = make_batches(make_groups(step, batch_size), config, step, 1)
        losses.append(actor.train(step, batch).metrics["train/loss"])
    trained = Trained(losses, before, _weights(actor))
    actor.shutdown()
    return trained


def _weights(actor: Any) -> Weights:
    # Arrays: a tensor in a queue is shared memory, which ends with the process.
    return {weight.name: weight.tensor.float().cpu().numpy() for weight in actor.ops.hf_weights()}


def distance(one: Weights, other: Weights) -> float:
    return math.sqrt(sum(float(((one[n] - other[n]) ** 2).sum()) for n in one))


def row(backend: str, wide: Trained, narrow: Trained) -> str:
    losses = [
        f"{statistics.fmean(values):.4f}"
        for run in (wide, narrow)
        for values in (run.losses[:ENDS], run.losses[-ENDS:])
    ]
    apart, moved = distance(wide.after, narrow.after), distance(wide.before, wide.after)
    return f"| {backend} | {' | '.join(losses)} | {apart / moved:.4f} |"


def main(options: Benchmark) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    model = make_model((options.folder / options.shape).resolve(), SHAPES[options.shape])
    print(f"{options.num_steps} steps; losses are means of {ENDS} steps\n")
    print("| backend | fp32: first | last | bf16: first | last | weights apart / moved |")
    print("|---|---:|---:|---:|---:|---:|")
    for backend in options.backends:
        runs = [
            in_process(train, make_config(options, backend, moments, model), options.batch_size)
            for moments in ("fp32", "bf16")
        ]
        print(row(backend, *runs), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
