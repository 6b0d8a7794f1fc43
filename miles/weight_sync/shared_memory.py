"""A bucket in POSIX shared memory, as the embedded engine maps it."""

import _posixshmem
import os
import uuid
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory

import torch

from miles.contracts.engine import ShmRef
from miles.contracts.types import WeightBucket

ALIGNMENT_BYTES = 64


class ShmSegment:
    """A segment that every engine maps."""

    def __init__(self) -> None:
        self._shm: SharedMemory | None = None

    def write(
        self, bucket: WeightBucket, *, num_engines: int, gpus_per_engine: int
    ) -> Sequence[ShmRef]:
        offsets, num_bytes = layout(bucket)
        shm = self.reserve(num_bytes)
        fill(shm, bucket, offsets)
        ref = ShmRef(
            shm_name=shm.name.removeprefix("/"),
            num_bytes=num_bytes,
            entries=tuple(zip(bucket.specs, offsets, strict=True)),
        )
        return [ref] * num_engines

    def reserve(self, num_bytes: int) -> SharedMemory:
        """A segment of at least this size."""
        if self._shm is not None and self._shm.size < num_bytes:
            self.release()
        if self._shm is None:
            name = f"miles-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self._shm = SharedMemory(name, create=True, size=max(num_bytes, 1))
            _commit(self._shm)
        return self._shm

    def release(self) -> None:
        """Unlink: engines that map the segment keep it, nobody can open it any more."""
        shm, self._shm = self._shm, None
        if shm is not None:
            shm.unlink()
            shm.close()


def layout(bucket: WeightBucket) -> tuple[list[int], int]:
    """The offset of each tensor, and the bytes of all."""
    offsets: list[int] = []
    end = 0
    for named in bucket.tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + named.tensor.nbytes
    return offsets, end


def fill(shm: SharedMemory, bucket: WeightBucket, offsets: list[int]) -> None:
    assert shm.buf is not None
    memory = torch.frombuffer(shm.buf, dtype=torch.uint8)
    try:
        for named, offset in zip(bucket.tensors, offsets, strict=True):
            if named.tensor.numel() > 0:
                raw = named.tensor.reshape(-1).view(torch.uint8)
                memory[offset : offset + raw.numel()].copy_(raw)
    finally:
        # A view that an error's traceback keeps would forbid closing the segment.
        del memory


def no_room(num_bytes: int, code: int) -> OSError:
    return OSError(
        code,
        f"no room for {num_bytes} bytes of shared memory ({os.strerror(code)}): enlarge /dev/shm "
        "(docker: --shm-size) or lower --update-weight-buffer-size",
    )


def _commit(shm: SharedMemory) -> None:
    """Make the system commit the memory now: writing to a full /dev/shm kills the process."""
    if not hasattr(os, "posix_fallocate"):
        return
    descriptor = _posixshmem.shm_open(f"/{shm.name}", os.O_RDWR, mode=0)
    try:
        os.posix_fallocate(descriptor, 0, shm.size)
    except OSError as error:
        raise no_room(shm.size, error.errno or 0) from error
    finally:
        os.close(descriptor)
