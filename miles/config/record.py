"""The config that a run leaves in its run directory: what tells that from a model's directory."""

import json
from pathlib import Path
from typing import Any

from miles.config.root import MilesConfig

FILE = "config.json"
"""Hugging Face directories have a file of this name too."""


def write_record(folder: Path, config: MilesConfig) -> None:
    """Raises ``OSError``."""
    text = json.dumps(config.to_dict(), indent=2)
    (folder / FILE).write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The groups of the config of the run whose directory ``folder`` is; ``None``: it is no run's.

    A run of an earlier version may lack groups and fields. Raises ``OSError`` for a file that is
    there and cannot be read.
    """
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(values, dict) or "model_type" in values or "architectures" in values:
        return None
    groups = (values.get(name) for name in ("checkpoint", "observability"))
    return values if all(isinstance(group, dict) for group in groups) else None
