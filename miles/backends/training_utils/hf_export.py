"""Writing a Hugging Face directory from a stream of full tensors."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from miles.backends.training_utils import export_mark
from miles.backends.training_utils.safetensors_file import Described, SafetensorsFile
from miles.contracts.types import NamedTensor
from miles.core import distributed, logging, places

log = logging.get(__name__)

SHARD_BYTES = 5 * 10**9
"""Largest file of an export."""

_STAGING, _REPLACED = ".miles-tmp", ".miles-old"
"""Behind the name of an export: what is being written, and what gives way. Both are removed, so
they are names that nobody else gives."""

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")


def export_hf(
    directory: str,
    source: str,
    weights: Sequence[Described],
    stream: Iterator[NamedTensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that transformers loads; collective (rank 0 writes).

    Everything of ``source`` but its weights is copied. The directory appears under its name only
    when it is complete, and replaces an older export, but nothing that was not written here. Raises
    on every rank when writing fails.
    """
    # A link to a directory stays one.
    final = Path(os.path.realpath(directory))
    staging = final.with_name(final.name + _STAGING)
    error: OSError | None = None
    writer = _ShardWriter(staging, weights, shard_bytes) if distributed.rank() == 0 else None
    try:
        if writer is not None:
            _check_replaceable(final)
            _copy_side_files(Path(source), staging, {weight.dtype for weight in weights})
    except OSError as caught:
        error = caught
    try:
        for item in stream:
            # After a failure the stream is still drained: the other ranks gather with this one.
            if writer is not None and error is None:
                try:
                    writer.add(item)
                except OSError as caught:
                    error = caught
    except BaseException:
        _clear_away(writer, staging)
        raise
    if writer is not None and error is None:
        try:
            writer.close()
            _replace(staging, final)
        except OSError as caught:
            error = caught
    if error is not None:
        error = _described(error, final)
        _clear_away(writer, staging)
    distributed.raise_together(error, f"export to {directory}")


def _described(error: OSError, final: Path) -> OSError:
    """Where the export was to be, which the system's error does not say, and what is free there."""
    if isinstance(error, FileExistsError):  # nothing was written
        return error
    return OSError(f"export to {final}: {error}; {places.free_space(final.parent)}")


def _clear_away(writer: "_ShardWriter | None", staging: Path) -> None:
    """What a failed export has written so far; ``None`` on ranks that write nothing."""
    if writer is not None:
        writer.abandon()
        shutil.rmtree(staging, ignore_errors=True)


class _ShardWriter:
    """Groups tensors into files whose number is known beforehand, as their names need. Tensors come
    in the order in which they were announced, and are written as they come."""

    def __init__(self, folder: Path, weights: Sequence[Described], shard_bytes: int) -> None:
        self._folder = folder
        self._files: list[list[Described]] = [[]]
        filled = 0
        for weight in weights:
            if filled and filled + weight.num_bytes > shard_bytes:
                filled = 0
                self._files.append([])
            filled += weight.num_bytes
            self._files[-1].append(weight)
        self._file_of = {w.name: n for n, members in enumerate(self._files) for w in members}
        self._current = -1
        self._open: SafetensorsFile | None = None

    def add(self, item: NamedTensor) -> None:
        number = self._file_of[item.name]
        if number != self._current or self._open is None:
            self._finish_file()
            self._current = number
            path = self._folder / self._file_name(number)
            self._open = SafetensorsFile(path, self._files[number], export_mark.METADATA)
        self._open.write(item.name, item.tensor)

    def close(self) -> None:
        self._finish_file()
        if len(self._files) > 1:
            total = sum(weight.num_bytes for members in self._files for weight in members)
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: self._file_name(n) for name, n in self._file_of.items()},
            }
            text = json.dumps(index, indent=1)
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        if self._open is not None:
            self._open.abandon()

    def _finish_file(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _file_name(self, number: int) -> str:
        if len(self._files) == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"


def _check_replaceable(final: Path) -> None:
    reason = export_mark.reason_against_replacing(final)
    if reason is not None:
        raise FileExistsError(f"{final} {reason}")


def _copy_side_files(source: Path, staging: Path, dtypes: set[torch.dtype]) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copy2(path, staging / path.name)
    config = json.loads((staging / "config.json").read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        name = str(next(iter(dtypes))).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            if key in config and config[key] != name:
                config[key] = name
                text = json.dumps(config, indent=2)
                (staging / "config.json").write_text(text, encoding="utf-8")


def _replace(staging: Path, final: Path) -> None:
    old = final.with_name(final.name + _REPLACED)
    if final.exists():
        # What a killed export left there would stop every later one.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staging.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    log.info("wrote %s", final)
