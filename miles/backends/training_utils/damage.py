"""Which file of a step cannot be read: the errors of PyTorch's loader do not name it, and advise to
load it unsafely."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from miles.backends.training_utils import checkpoints
from miles.config.errors import ConfigError, Problem
from miles.core import distributed


def damage_in(step: Path, folder: Path) -> str | None:
    """What to tell of a ``folder`` of Distributed Checkpoint, the step itself or a part of it, that
    could not be loaded: the damaged file and what to do. ``None`` when every file can be read."""
    damaged = first_damaged(folder)
    return None if damaged is None else checkpoints.damaged(step, damaged)


def load_random_state(step: Path, file: Path) -> dict[str, Tensor]:
    """The tensors of ``file``, this rank's own of ``step``. Collective: raises ``ConfigError`` and,
    on the ranks that could read theirs, an error that quotes it."""
    state: dict[str, Tensor] = {}
    error: Exception | None = None
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as caught:
        told = checkpoints.damaged(step, file)
        error = ConfigError([Problem("--load", str(step.parent), told)])
        error.__cause__ = caught
    distributed.raise_together(error, "--load")
    return state


def first_damaged(folder: Path) -> Path | None:
    """The first file, in the order of their names, with a tensor or an object that cannot be
    loaded; ``None`` when all can. Reads the whole folder."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception:  # a damaged pickle may raise anything
        return folder / ".metadata"
    for name, entries in sorted(_by_file(metadata).items()):
        path = folder / name
        if not _is_readable(path, entries):
            return path
    return None


def _by_file(metadata: Metadata) -> dict[str, dict[Any, bool]]:
    """Where the entries of each file lie, and whether they are pickled objects."""
    found: dict[str, dict[Any, bool]] = {}
    storage: Mapping[Any, Any] = metadata.storage_data
    for index, info in storage.items():
        stored = metadata.state_dict_metadata[index.fqn]
        is_object = isinstance(stored, BytesStorageMetadata)
        found.setdefault(info.relative_path, {})[info.offset, info.length] = is_object
    return found


def _is_readable(path: Path, entries: Mapping[tuple[int, int], bool]) -> bool:
    try:
        with path.open("rb") as file:
            for (offset, length), is_object in sorted(entries.items()):
                file.seek(offset)
                content = io.BytesIO(file.read(length))
                torch.load(content, map_location="cpu", weights_only=not is_object)
    except Exception:  # a damaged pickle may raise anything
        return False
    return True
