"""Which file of a torch_dist step cannot be read; the errors of PyTorch's loader do not name it."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata


def first_damaged(step: Path) -> Path | None:
    """The first file, in the order of their names, with a tensor or an object that cannot be
    loaded; ``None`` when all can. Reads the whole step."""
    try:
        metadata = FileSystemReader(step).read_metadata()
    except Exception:  # a damaged pickle may raise anything
        return step / ".metadata"
    for name, entries in sorted(_by_file(metadata).items()):
        path = step / name
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
