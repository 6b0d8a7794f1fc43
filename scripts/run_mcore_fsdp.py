"""Compares the two training backends on one model: the same recipe, once with each.

```
python scripts/run_mcore_fsdp.py --train-backend fsdp
python scripts/run_mcore_fsdp.py --train-backend megatron
```

Without ``--hf-checkpoint`` it is the demo's task on a CPU, from one warmed-up model that the first
of the two makes. Each run goes to ``runs/mcore-fsdp/<backend>``, in place of an earlier one only
with ``--replace``; the second draws the rewards and losses of both into
``runs/mcore-fsdp/comparison.png``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.core.tracking import METRICS_FILE
from miles.report import draw_comparison
from miles.utils.arguments import parse_args
from miles.utils.external_utils.command_utils import (
    FlagValue,
    delete_run,
    require_flags,
    run_train,
    to_argv,
)
from scripts import run_demo_cpu, run_smollm2_135m_cpu
from scripts.run_demo_cpu import WARM_MODEL, Backend, Demo
from scripts.run_smollm2_135m_cpu import SmolLM2

BACKENDS: tuple[Backend, ...] = ("fsdp", "megatron")


@dataclass(frozen=True)
class Comparison:
    """Train one model with the chosen backend, and draw the run beside the other backend's."""

    train_backend: Backend
    """Training backend of this run."""
    hf_checkpoint: Path | None = None
    """An instruction-tuned model, trained on sums (chain_sum) instead of the demo's task."""
    num_rollout: int = 60
    """Rollouts; the first of the two runs must have had as many, for curves that compare."""
    num_ranks: int = 2
    """Trainer ranks."""
    tensor_model_parallel_size: int | None = None
    """Of the Megatron run, 2 if not given; 1 is data parallelism, which FSDP always has."""
    seed: int = 0
    """Seed of data, sampling and training, and of the demo's model."""
    folder: Path = Path("runs/mcore-fsdp")
    """Both runs and their picture."""
    replace: bool = False
    """Delete what an earlier run with this backend left in the folder."""


def flags(recipe: Comparison, start: Path, model: Path) -> dict[str, FlagValue]:
    """The command line of ``train.py``; the demo's data lies in ``start``."""
    run_dir = recipe.folder.resolve() / recipe.train_backend
    if recipe.hf_checkpoint is None:
        found = run_demo_cpu.reinforcement_flags(demo_of(recipe), start, model)
    else:
        found = run_smollm2_135m_cpu.flags(SmolLM2(seed=recipe.seed), model)
    found |= {
        "train-backend": recipe.train_backend,
        "num-rollout": recipe.num_rollout,
        "actor-num-gpus-per-node": recipe.num_ranks,
        "tensor-model-parallel-size": None,
        "sequence-parallel": None,
        "load": None,
        "save": run_dir / "checkpoints",
        "run-dir": run_dir,
    }
    tensor = recipe.tensor_model_parallel_size
    if tensor is None and recipe.train_backend == "megatron":
        tensor = 2
    # Also what is given to FSDP, which refuses it.
    if tensor is not None and tensor != 1:
        found |= {"tensor-model-parallel-size": tensor, "sequence-parallel": tensor > 1 or None}
    return found


def demo_of(recipe: Comparison) -> Demo:
    return Demo(
        seed=recipe.seed, train_backend=recipe.train_backend, num_rollout=recipe.num_rollout
    )


def draw(folder: Path) -> Path | None:
    """Both runs in one picture; ``None`` while one is missing."""
    runs = {name: folder / name for name in BACKENDS}
    if not all((run_dir / METRICS_FILE).is_file() for run_dir in runs.values()):
        return None
    return draw_comparison(runs, folder / "comparison.png")


def main(recipe: Comparison) -> int:
    folder = recipe.folder.resolve()
    run_dir = folder / recipe.train_backend
    if not recipe.replace and run_dir.is_dir() and any(run_dir.iterdir()):
        print(
            f"{run_dir} holds an earlier run: --replace deletes it, --folder keeps both",
            file=sys.stderr,
        )
        return 2
    size = recipe.tensor_model_parallel_size
    if size is not None and size < 1:
        # Megatron's own flags are only read once there is a model.
        print(f"--tensor-model-parallel-size {size}: must be at least 1", file=sys.stderr)
        return 2
    start = folder / f"start-seed-{recipe.seed}"
    model = recipe.hf_checkpoint
    if model is None:
        warm = start / WARM_MODEL
        if not warm.is_dir():
            require_flags(flags(recipe, start, warm), run_demo_cpu.made(start))
            run_demo_cpu.warm_up(demo_of(recipe), start)
        model = warm
    given = flags(recipe, start, model.resolve())
    # What train.py would refuse must not cost the earlier run.
    parse_args(to_argv(given))
    if run_dir.exists():
        print(f"replacing the run that was there: {run_dir}", flush=True)
        delete_run(run_dir)
    run_train(given)
    picture = draw(folder)
    if picture is None:
        print("the same with the other --train-backend draws both in one picture")
    else:
        print(f"rewards and losses of both backends: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Comparison, description=__doc__)))
