"""A real model learns arithmetic on a CPU: SmolLM2-135M-Instruct, GRPO, ``chain_sum``.

The model comes from the Python package index (``scripts/smollm2.py``). It is asked sums and
differences of small numbers, like "State the final answer to the following arithmetic problem:
4 + 3 =", and trained on whether the number it ends on is right. Run the recipe again with the
same run directory and it goes on where it stopped.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.core.tracking import read_metrics
from miles.utils.external_utils.command_utils import FlagValue, require_flags, run_train
from scripts.smollm2 import DtypeName, FetchError, place, prepare

TASK = "reasoning_gym:chain_sum"
NUM_PROBLEMS = 10_000
NUM_EVAL = 64
ENDS = 10


@dataclass(frozen=True)
class SmolLM2:
    """Train SmolLM2-135M-Instruct on chain_sum."""

    seed: int = 0
    """Seed of data, sampling and training."""
    num_rollout: int = 40
    """Rollouts of 8 prompts x 8 samples, one optimizer step each."""
    train_backend: str = "fsdp"
    """Training backend."""
    num_ranks: int = 1
    """Trainer ranks; they share the cores, and one alone sends nothing to others."""
    dtype: DtypeName = "fp32"
    """Of the weights on disk and in the engine, and of the trainer's computation."""
    lr: float = 2e-5
    """Learning rate."""
    max_terms: int = 2
    """Most terms of a problem (at least 2)."""
    max_digits: int = 1
    """Most digits of a term."""
    save_interval: int = 10
    """Rollouts between two checkpoints; a run that is stopped goes on from the last one."""
    run_dir: Path = Path("runs/smollm2-135m")
    """Metrics, samples, reward curve and checkpoints."""


def problems(recipe: SmolLM2) -> dict[str, FlagValue]:
    kwargs = {
        "size": NUM_PROBLEMS,
        "seed": recipe.seed,
        "min_terms": 2,
        "max_terms": recipe.max_terms,
        "min_digits": 1,
        "max_digits": recipe.max_digits,
    }
    return {
        "prompt-data": f"{TASK}@[{NUM_EVAL}:]",
        "prompt-data-kwargs": json.dumps(kwargs),
        "apply-chat-template": True,
        "custom-rm-path": "scripts.chain_sum.reward",
        "eval-prompt-data": ["greedy", f"{TASK}@[:{NUM_EVAL}]"],
        "eval-temperature": 0.0,
        "eval-interval": 20,
    }


def flags(recipe: SmolLM2, model: Path) -> dict[str, FlagValue]:
    """The command line of ``train.py``."""
    run_dir = recipe.run_dir.resolve()
    return {
        **problems(recipe),
        "train-backend": recipe.train_backend,
        "actor-num-gpus-per-node": recipe.num_ranks,
        "rollout-num-gpus": 1,
        "rollout-engine": "embedded",
        "hf-checkpoint": model,
        "fp32": recipe.dtype == "fp32",
        "seed": recipe.seed,
        "rollout-seed": recipe.seed,
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 8,
        "rollout-max-response-len": 24,
        "num-steps-per-rollout": 1,
        "micro-batch-size": 16,
        "num-rollout": recipe.num_rollout,
        "lr": recipe.lr,
        "check-weight-update-equal": True,
        "load": run_dir / "checkpoints",
        "save": run_dir / "checkpoints",
        "save-interval": recipe.save_interval,
        "save-keep": 1,
        "run-dir": run_dir,
    }


def summary(run_dir: Path) -> str:
    """First against last rollouts."""
    rows = [row for row in read_metrics(run_dir) if "rollout/raw_reward" in row]
    rewards = [row["rollout/raw_reward"] for row in rows]
    ends = min(ENDS, max(1, len(rewards) // 2))
    first, last = statistics.fmean(rewards[:ends]), statistics.fmean(rewards[-ends:])
    seconds = statistics.median(row["perf/step_time"] for row in rows if "perf/step_time" in row)
    return (
        f"share of right answers: {first:.3f} in the first {ends} rollouts, {last:.3f} in the "
        f"last {ends}; {seconds:.1f} s a rollout (median)\n"
        f"samples: {run_dir / 'samples.txt'}"
    )


def main(recipe: SmolLM2) -> int:
    target = place(recipe.dtype)
    require_flags(flags(recipe, target), [target])
    try:
        model = prepare(recipe.dtype)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    run_train(flags(recipe, model))
    print(summary(recipe.run_dir.resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(SmolLM2, description=__doc__)))
