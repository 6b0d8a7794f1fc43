"""In which form a checkpoint holds the optimizer's moments, and whether a run may read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles.config.errors import ConfigError, Problem
from miles.core import logging

KEY = "optimizer_state"
"""In the metadata of a checkpoint."""

log = logging.get(__name__)


def described(moments: Mapping[str, torch.dtype], *, streamed: bool) -> dict[str, Any]:
    """For the metadata: the dtype of each moment, and whether it lies on disk during training."""
    dtypes = {kind: str(dtype).removeprefix("torch.") for kind, dtype in sorted(moments.items())}
    return {"moments": dtypes, "streamed": streamed}


def check(
    step: Path, metadata: Mapping[str, Any], own: Mapping[str, Any], *, convert: bool
) -> None:
    """Raise ``ConfigError`` where the step's moments have another dtype than the run's ``own``,
    unless the user wants them converted; log what is converted."""
    saved = metadata.get(KEY)
    if saved is None:
        return
    if saved["moments"] != own["moments"]:
        kinds = f"{_text(saved['moments'])}, and this run keeps {_text(own['moments'])}"
        if not convert:
            remedy = (
                f"step {metadata['iteration']} was saved with moments in {kinds}: run with the "
                "same, or have them converted with --convert-optimizer-state"
            )
            raise ConfigError([Problem("--load", str(step.parent), remedy)])
        log.warning("%s: moments are converted: saved in %s", step, kinds)
    if saved["streamed"] != own["streamed"]:
        places = ("on the device", "on disk (--stream-optimizer-state-to-disk)")
        before, now = places[saved["streamed"]], places[own["streamed"]]
        log.info("%s: the optimizer's state was kept %s, and is now %s", step, before, now)


def _text(moments: Mapping[str, str]) -> str:
    dtypes = set(moments.values())
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{dtype} ({kind})" for kind, dtype in moments.items())
