"""A bucket as SGLang takes it: one shared tensor with a description, in its own serialization."""

# pyright: reportMissingImports=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

import errno
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, multiprocessing

from miles.contracts.engine import FlattenedRef
from miles.contracts.types import WeightBucket
from miles.core import device
from miles.weight_sync.shared_memory import no_room

SHARED_MEMORY = "/dev/shm"


class FlattenedSegment:
    """A host tensor that every scheduler of every engine maps.

    Each of them gets a handle of its own: a handle counts as one reader, who gives it back.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def write(
        self, bucket: WeightBucket, *, num_engines: int, gpus_per_engine: int
    ) -> Sequence[FlattenedRef]:
        payload = flatten(bucket, self._reserve(size_of(bucket)))
        with _shared_by_name():
            return [
                FlattenedRef(serialized=tuple(serialize(payload) for _ in range(gpus_per_engine)))
                for _ in range(num_engines)
            ]

    def release(self) -> None:
        """Engines that map the memory keep it."""
        self._memory = None

    def _reserve(self, num_bytes: int) -> Tensor:
        if self._memory is not None and self._memory.numel() >= num_bytes:
            return self._memory
        self._memory = None
        system = os.statvfs(SHARED_MEMORY)
        if num_bytes > system.f_bavail * system.f_frsize:
            raise no_room(num_bytes, errno.ENOSPC)
        memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
        with _shared_by_name():
            memory.share_memory_()
        self._memory = memory
        return memory


class DeviceSegment:
    """A tensor on this rank's device, which one scheduler maps that runs on the same device."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def write(self, bucket: WeightBucket) -> str:
        """Hold this bucket instead of the one before; return the handle for the one reader."""
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # Devices by their identity: the reader's may have another number there.
        monkey_patch_torch_reductions()
        num_bytes = size_of(bucket)
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None
            where = device.current_device()
            self._memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=where)
        return serialize(flatten(bucket, self._memory))

    def release(self) -> None:
        """Give the memory back to the device, once the reader has let it go."""
        self._memory = None
        device.collect_shared()
        device.empty_cache()


def size_of(bucket: WeightBucket) -> int:
    return sum(named.tensor.nbytes for named in bucket.tensors)


def flatten(bucket: WeightBucket, memory: Tensor) -> dict[str, Any]:
    """Copy the bucket into ``memory`` (uint8, large enough); the payload that SGLang reads."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    # One dtype a bucket: tensors that follow each other without gaps are aligned.
    metadata: list[FlattenedTensorMetadata] = []
    end = 0
    for named in bucket.tensors:
        start, end = end, end + named.tensor.nbytes
        memory[start:end].copy_(named.tensor.reshape(-1).view(torch.uint8))
        metadata.append(
            FlattenedTensorMetadata(
                name=named.name,
                shape=named.tensor.shape,
                dtype=named.tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
    return {"flattened_tensor": memory[:end], "metadata": metadata}


def serialize(payload: dict[str, Any]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    text = MultiprocessingSerializer.serialize(payload, output_str=True)
    assert isinstance(text, str)
    return text


@contextmanager
def _shared_by_name() -> Generator[None]:
    """Share memory under a name: the other strategy passes descriptors between processes that
    Python's ``multiprocessing`` has started, and SGLang's are not."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
