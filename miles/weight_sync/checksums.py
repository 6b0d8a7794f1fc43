"""Digests that say whether trainer and engine hold the same bytes."""

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

# Device tensors come to the host in pieces of this size: bounded memory, same digest.
CHUNK_BYTES = 64 * 1024**2


class Digests(Protocol):
    """Digests of what is sent, in the names and by the hash of the engines' own."""

    def add(self, name: str, tensor: Tensor) -> None: ...
    def result(self) -> Mapping[str, str]: ...


class TensorDigests:
    """One digest for each tensor of the checkpoint: ``checksum``."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._digests[name] = checksum(tensor)

    def result(self) -> Mapping[str, str]:
        return self._digests


def checksum(tensor: Tensor) -> str:
    """xxh3-128 hex digest of the tensor's bytes in C order (any dtype, shape, stride, device)."""
    digest = xxhash.xxh3_128()
    feed(digest, tensor)
    return digest.hexdigest()


def feed(digest: Any, tensor: Tensor) -> None:
    """Update a digest with the tensor's bytes in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() > 0:
        for chunk in flat.view(torch.uint8).split(CHUNK_BYTES):
            # Bound to a name: a copy from a device must outlive the view of its bytes.
            host = chunk.cpu()
            digest.update(_bytes_of(host))


def _bytes_of(flat: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a uint8 tensor that the caller keeps alive. Not ``numpy()``: that makes the
    storage unresizable for good, and a sleeping model could not free it."""
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())


def compare(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """One line for each tensor that differs or is on one side only; empty when all are equal."""
    differences: list[str] = []
    for name in sorted(trainer.keys() | engine.keys()):
        if name not in engine:
            differences.append(f"{name}: the engine does not have it")
        elif name not in trainer:
            differences.append(f"{name}: the trainer did not send it")
        elif trainer[name] != engine[name]:
            differences.append(f"{name}: trainer {trainer[name]}, engine {engine[name]}")
    return differences
