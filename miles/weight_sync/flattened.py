"""A bucket as SGLang takes it: one shared tensor with a description, in its own serialization."""

# pyright: reportMissingImports=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

import errno
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, multiprocessing

from miles.contracts.engine import FlattenedRef
from miles.contracts.types import WeightBucket
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
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        # One dtype a bucket: tensors that follow each other without gaps are aligned.
        num_bytes = sum(named.tensor.nbytes for named in bucket.tensors)
        memory = self._reserve(num_bytes)
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
        payload = {"flattened_tensor": memory[:num_bytes], "metadata": metadata}

        def serialize() -> str:
            text = MultiprocessingSerializer.serialize(payload, output_str=True)
            assert isinstance(text, str)
            return text

        with _shared_by_name():
            return [
                FlattenedRef(serialized=tuple(serialize() for _ in range(gpus_per_engine)))
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
