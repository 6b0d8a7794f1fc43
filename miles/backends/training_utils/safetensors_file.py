"""A safetensors file written tensor by tensor: the library's own writer wants all of them at once,
which for an export would be gigabytes of host memory.

The format is a header in JSON behind its length, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

DTYPES = {
    "BOOL": torch.bool,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Codes of the dtypes that models are stored in, in the library's order: widest last."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT_BYTES = 8
_PLAIN = {"format": "pt"}
"""What transformers asks for."""


class Described(Protocol):
    """What the header says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def num_bytes(self) -> int: ...


class SafetensorsFile:
    """Byte for byte what ``safetensors.torch.save_file`` would write of these tensors."""

    def __init__(
        self, path: Path, tensors: Iterable[Described], metadata: Mapping[str, str] = _PLAIN
    ) -> None:
        """Write the header. Raises ``OSError``."""
        rank = list(DTYPES).index
        ordered = sorted(tensors, key=lambda t: (-rank(_CODES[t.dtype]), t.name))
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._places: dict[str, tuple[int, Described]] = {}
        end = 0
        for tensor in ordered:
            begin, end = end, end + tensor.num_bytes
            self._places[tensor.name] = (begin, tensor)
            header[tensor.name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        self._data_start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Each tensor once, in any order. Raises ``OSError``."""
        offset, described = self._places.pop(name)
        assert (tensor.dtype, tensor.shape) == (described.dtype, described.shape), name
        self._file.seek(self._data_start + offset)
        self._file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Make the file durable. Raises ``OSError``."""
        assert not self._places, f"never written: {', '.join(self._places)}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close what will be removed, whatever state it is in."""
        # A full disk refuses what is still buffered once more.
        with contextlib.suppress(OSError):
            self._file.close()
