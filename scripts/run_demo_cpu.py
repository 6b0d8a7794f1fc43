"""The demo: a made 0.4M-parameter Qwen3 learns to reverse four digits, on a CPU, in minutes.

A supervised warm-up with our own loss, then GRPO through ``train.py``: two trainer ranks over gloo
(FSDP2, or Megatron with tensor and sequence parallelism), an engine (embedded, or SGLang), weights
synced and checked after every rollout, a checkpoint on disk.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.core.tracking import read_metrics
from miles.utils.external_utils.command_utils import FlagValue, delete_run, require_flags, run_train
from scripts import reverse_digits
from scripts.made_models import make_qwen3

TARGET = 0.85
LAST = 25
DATA, WARM_MODEL = "data", "warm-model"
"""What the warm-up makes, in the folder of the demo."""

Backend = Literal["fsdp", "megatron"]
Engine = Literal["embedded", "sglang"]
LAYOUTS: dict[Backend, dict[str, FlagValue]] = {
    "fsdp": {},
    "megatron": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
}
"""How each backend lays the model over the two ranks."""


@dataclass(frozen=True)
class Demo:
    """Reverse four digits with reinforcement learning."""

    seed: int = 0
    """Seed of model, data, sampling and training: the same seed gives the same run."""
    train_backend: Backend = "fsdp"
    """Training backend."""
    rollout_engine: Engine = "embedded"
    """Engine server; with SGLang (`make sglang-cpu`) two runs of a seed differ."""
    num_warm_up: int = 34
    """Supervised steps before it."""
    num_rollout: int = 200
    """Rollouts of reinforcement learning."""
    run_dir: Path = Path("runs/demo")
    """Everything the demo writes."""


def shared_flags(demo: Demo) -> dict[str, FlagValue]:
    return {
        "train-backend": demo.train_backend,
        **LAYOUTS[demo.train_backend],
        "actor-num-gpus-per-node": 2,
        "fp32": True,
        "seed": demo.seed,
        "rollout-seed": demo.seed,
        "rollout-shuffle": True,
        "label-key": "label",
        "clip-grad": 1.0,
        "adam-beta1": 0.9,
        "adam-beta2": 0.95,
    }


def warm_up(demo: Demo, folder: Path) -> Path:
    """Write the data and take a few supervised steps; returns the exported model."""
    reverse_digits.write_data(
        folder / DATA,
        demo.seed,
        num_supervised=128 * demo.num_warm_up,
        num_train=6400,
        num_eval=128,
    )
    model = make_qwen3(
        folder / "model",
        alphabet=reverse_digits.ALPHABET,
        hidden_size=128,
        intermediate_size=384,
        head_dim=32,
        seed=demo.seed,
    )
    export = folder / WARM_MODEL
    flags: dict[str, FlagValue] = {
        **shared_flags(demo),
        "loss-type": "sft_loss",
        "hf-checkpoint": model,
        "prompt-data": folder / DATA / "supervised.jsonl",
        "rollout-batch-size": 128,
        "micro-batch-size": 64,
        "num-rollout": demo.num_warm_up,
        "lr": 1e-3,
        "save": folder / "warm-checkpoints",
        "save-hf": export,
        "run-dir": folder / "warm-up",
    }
    run_train(flags)
    return export


def made(folder: Path) -> list[Path]:
    """What the warm-up leaves in ``folder`` for the command line of ``train.py``."""
    return [folder / DATA, folder / WARM_MODEL]


def reinforcement_flags(demo: Demo, folder: Path, model: Path) -> dict[str, FlagValue]:
    """The command line of ``train.py``, with the data in ``folder``."""
    return {
        **shared_flags(demo),
        "rollout-num-gpus": 1,
        "rollout-engine": demo.rollout_engine,
        "deterministic-rollout": demo.rollout_engine == "embedded",
        "hf-checkpoint": model,
        "prompt-data": folder / DATA / "train.jsonl",
        "custom-rm-path": "scripts.reverse_digits.reward",
        "rollout-batch-size": 32,
        "n-samples-per-prompt": 16,
        "num-steps-per-rollout": 2,
        "micro-batch-size": 128,
        "num-rollout": demo.num_rollout,
        "rollout-max-response-len": 6,
        "lr": 5e-4,
        "lr-decay-style": "linear",
        "eps-clip": 0.2,
        "eps-clip-high": 0.28,
        "disable-grpo-std-normalization": True,
        "entropy-coef": 0.01,
        "eval-interval": 50,
        "eval-prompt-data": ["greedy", folder / DATA / "eval.jsonl"],
        "eval-temperature": 0.0,
        "check-weight-update-equal": True,
        "save": folder / "checkpoints",
        "save-interval": 50,
        "save-keep": 1,
        "run-dir": folder,
    }


def rewards(folder: Path) -> list[float]:
    return [
        row["rollout/raw_reward"] for row in read_metrics(folder) if "rollout/raw_reward" in row
    ]


def main(demo: Demo) -> int:
    prefix = "" if demo.train_backend == "fsdp" else f"{demo.train_backend}-"
    prefix += "" if demo.rollout_engine == "embedded" else f"{demo.rollout_engine}-"
    folder = demo.run_dir.resolve() / f"{prefix}seed-{demo.seed}"
    # What train.py would refuse must cost neither the warm-up nor the demo that was there.
    warm = folder / WARM_MODEL
    require_flags(reinforcement_flags(demo, folder, warm), made(folder))
    if folder.exists():
        print(f"replacing the demo that was there: {folder}", flush=True)
        delete_run(folder)
    print("1/2  supervised warm-up: the model sees some right answers", flush=True)
    model = warm_up(demo, folder)
    print("2/2  reinforcement learning: it samples, is scored, and learns from that", flush=True)
    run_train(reinforcement_flags(demo, folder, model))
    values = rewards(folder)
    first, last = values[0], statistics.fmean(values[-LAST:])
    print(f"mean sampled reward: {first:.3f} at the start, {last:.3f} over the last {LAST}")
    print(f"samples: {folder / 'samples.txt'}")
    return 0 if demo.num_rollout < Demo.num_rollout or last >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Demo, description=__doc__)))
