"""A run that resumes goes on in the W&B run that its checkpoint names; offline, without engines."""

from pathlib import Path
from typing import Any

import pytest

from miles.backends.training_utils.checkpoints import read_metadata, step_dir
from tests.e2e.conftest import Runner
from tests.wandb_files import history, only, records

pytest.importorskip("wandb")


@pytest.mark.full
def test_a_resumed_run_goes_on_in_the_wandb_run_of_its_checkpoint(
    run_train: Runner, tiny_qwen3: Path, reverse_data: Path, tmp_path: Path
) -> None:
    ckpt = tmp_path / "ckpt"
    flags: dict[str, Any] = {
        "train-backend": "fsdp",
        "fp32": True,
        "loss-type": "sft_loss",
        "hf-checkpoint": tiny_qwen3,
        "prompt-data": reverse_data / "supervised.jsonl",
        "label-key": "label",
        "rollout-batch-size": 4,
        "num-rollout": 2,
        "save": ckpt,
        "load": ckpt,
        "save-interval": 1,
        "use-wandb": True,
        "wandb-mode": "offline",
    }
    first = run_train({**flags, "debug-exit-after-rollout": 1, "run-dir": tmp_path / "a"})
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_train({**flags, "run-dir": tmp_path / "b"})
    assert second.returncode == 0, second.stdout + second.stderr

    run_id = read_metadata(step_dir(ckpt, 1))["config"]["observability"]["wandb_run_id"]
    assert run_id
    steps: list[list[int]] = []
    for run in ("a", "b"):
        (file,) = (tmp_path / run / "wandb").glob("offline-run-*/run-*.wandb")
        found = list(records(file))
        assert [r.run_id for r in only("run", found)] == [run_id]
        steps.append(sorted({row["step"] for row in history(found)}))
    assert steps == [[1], [2]]
    assert read_metadata(step_dir(ckpt, 2))["config"]["observability"]["wandb_run_id"] == run_id
