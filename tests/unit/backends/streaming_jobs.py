"""Runs with the optimizer's state on disk, and what the tests of both backends compare."""

from pathlib import Path
from typing import Any

STEPS = {"lr": 1e-2, "lr_decay_style": "cosine", "lr_warmup_iters": 3, "weight_decay": 0.1}
"""Clipping is on by default."""
NUM_ROLLOUTS = 10
"""Of two steps each."""


def on_disk(directory: Path) -> dict[str, Any]:
    """Fields of ``OffloadConfig``."""
    return {
        "offload_train": True,
        "offload_train_target": "disk",
        "offload_train_disk_dir": str(directory),
        "offload_train_disk_chunk_mb": 1,
    }


def streaming(directory: Path, moments: str = "fp32") -> dict[str, Any]:
    """Fields of ``OffloadConfig``."""
    return {
        **on_disk(directory),
        "stream_optimizer_state_to_disk": True,
        "stream_optimizer_state_moment_dtype": moments,
    }
