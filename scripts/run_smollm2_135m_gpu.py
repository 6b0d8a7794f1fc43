"""A real model learns arithmetic on one accelerator: SmolLM2-135M-Instruct, GRPO, ``chain_sum``.

The recipe of ``run_smollm2_135m_cpu.py`` with SGLang as the engine, colocated with a trainer of
either backend; the problems are longer, since there is time for more of them. Run it again with the
same run directory and it goes on where it stopped.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.utils.external_utils.command_utils import (
    FlagValue,
    require_flags,
    run_train,
    with_values_joined,
    words_of,
)
from scripts.run_smollm2_135m_cpu import SmolLM2, problems, summary
from scripts.smollm2 import FetchError, place, prepare


@dataclass(frozen=True)
class SmolLM2OnAccelerator:
    """Train SmolLM2-135M-Instruct on chain_sum with SGLang."""

    seed: int = 0
    """Seed of data, sampling and training."""
    num_rollout: int = 60
    """Rollouts of 32 prompts x 16 samples, one optimizer step each."""
    train_backend: str = "fsdp"
    """Training backend."""
    num_gpus: int = 1
    """Devices, each with a trainer rank and an engine."""
    lr: float = 2e-5
    """Learning rate."""
    max_terms: int = 3
    """Most terms of a problem (at least 2)."""
    max_digits: int = 2
    """Most digits of a term."""
    flags: str = ""
    """More flags of train.py, as on the command line: --flags "--sglang-page-size 16"."""
    run_dir: Path = Path("runs/smollm2-135m-gpu")
    """Metrics, samples, reward curve and checkpoints."""


def flags(recipe: SmolLM2OnAccelerator, model: Path) -> dict[str, FlagValue]:
    """The command line of ``train.py``."""
    run_dir = recipe.run_dir.resolve()
    sums = SmolLM2(seed=recipe.seed, max_terms=recipe.max_terms, max_digits=recipe.max_digits)
    return {
        **problems(sums),
        "train-backend": recipe.train_backend,
        "actor-num-gpus-per-node": recipe.num_gpus,
        "colocate": True,
        "rollout-engine": "sglang",
        "hf-checkpoint": model,
        "seed": recipe.seed,
        "rollout-seed": recipe.seed,
        "rollout-batch-size": 32,
        "n-samples-per-prompt": 16,
        "rollout-max-response-len": 48,
        "num-steps-per-rollout": 1,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": 32_768,
        "num-rollout": recipe.num_rollout,
        "lr": recipe.lr,
        "check-weight-update-equal": True,
        "load": run_dir / "checkpoints",
        "save": run_dir / "checkpoints",
        "save-interval": 20,
        "save-keep": 1,
        "run-dir": run_dir,
    }


def main(recipe: SmolLM2OnAccelerator) -> int:
    more, target = words_of("--flags", recipe.flags), place("bf16")
    require_flags(flags(recipe, target), [target], more=more)
    try:
        model = prepare("bf16")
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    run_train(flags(recipe, model), more=more)
    print(summary(recipe.run_dir.resolve()))
    return 0


if __name__ == "__main__":
    given = with_values_joined(sys.argv[1:], "--flags")
    sys.exit(main(tyro.cli(SmolLM2OnAccelerator, description=__doc__, args=given)))
