"""The weights of a Hugging Face directory: what its files hold, read lazily by tensor or slice."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles.backends.training_utils.safetensors_file import DTYPES
from miles.core.hf import CheckpointDirError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Header:
    """What a checkpoint file says about one tensor."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class HFFiles:
    """The safetensors files of a directory. Opening reads the headers, nothing more."""

    def __init__(self, directory: str | Path) -> None:
        """Raise ``CheckpointDirError`` without safetensors files, for damaged ones, and for dtypes
        that are not trained (quantized weights)."""
        self.directory = Path(directory)
        self._open: dict[Path, Any] = {}
        self.headers: Mapping[str, Header] = self._read_headers(_files(self.directory))

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises ``CheckpointDirError``."""
        return self.read_slice(name, 0, 0, None)

    def read_slice(self, name: str, dim: int, start: int, stop: int | None) -> Tensor:
        """``tensor.narrow`` from the file: the rest is not read. ``dim`` is 0 or 1."""
        header = self._header(name)
        view = self._handle(header.file).get_slice(name)
        if not header.shape:
            return view[...]
        return view[start:stop] if dim == 0 else view[:, start:stop]

    def _header(self, name: str) -> Header:
        header = self.headers.get(name)
        if header is None:
            raise CheckpointDirError(f"{str(self.directory)!r} has no tensor named {name}")
        return header

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = _opened(file)
        return self._open[file]

    def _read_headers(self, files: list[Path]) -> dict[str, Header]:
        headers: dict[str, Header] = {}
        for file in files:
            # Not kept open: who wants the headers alone may hold this object for long.
            handle = _opened(file)
            for name in handle.keys():  # noqa: SIM118
                view = handle.get_slice(name)
                code = view.get_dtype()
                if code not in DTYPES:
                    raise CheckpointDirError(
                        f"{file}: {name} is stored as {code}; convert the checkpoint to bf16 first"
                    )
                shape = torch.Size(view.get_shape())
                headers[name] = Header(name, file, DTYPES[code], shape)
        return headers


def checkpoint_dtypes(path: str) -> dict[str, torch.dtype]:
    """Dtype of each tensor in a Hugging Face directory, safetensors or pickled.

    Raises ``CheckpointDirError`` for dtypes that are not trained (quantized weights).
    """
    folder = Path(path)
    if not (folder / INDEX).is_file() and not any(folder.glob("model*.safetensors")):
        return _pickled_dtypes(folder)
    return {name: header.dtype for name, header in HFFiles(folder).headers.items()}


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointDirError(f"{str(folder)!r} has no weights (model*.safetensors)")
    return files


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt").__enter__()
    except FileNotFoundError:
        raise CheckpointDirError(f"{file} is missing, which {INDEX} names") from None
    except SafetensorError as error:
        raise CheckpointDirError(f"{file} is damaged: {error}") from error


def _pickled_dtypes(folder: Path) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        tensors = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
        dtypes |= {name: tensor.dtype for name, tensor in tensors.items()}
    return dtypes
