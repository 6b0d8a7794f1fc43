"""Weights through POSIX shared memory, for engines on the trainer's machine."""

import _posixshmem
import os
import uuid
from concurrent.futures import Future
from multiprocessing.shared_memory import SharedMemory

import torch

from miles.contracts.engine import EngineSet, ShmRef
from miles.contracts.types import WeightBucket
from miles.core import distributed

ALIGNMENT_BYTES = 64


class Slot:
    """A segment, and the load that still reads it."""

    def __init__(self) -> None:
        self._shm: SharedMemory | None = None
        self._load: Future[None] | None = None

    def reserve(self, num_bytes: int) -> SharedMemory:
        """A segment of at least this size that nobody reads."""
        if self._shm is not None and self._shm.size < num_bytes:
            self.release()
        if self._shm is None:
            name = f"miles-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self._shm = SharedMemory(name, create=True, size=max(num_bytes, 1))
            _commit(self._shm)
        return self._shm

    def submitted(self, load: "Future[None]") -> None:
        self._load = load

    def wait(self, timeout_s: float) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.result(timeout_s)

    def release(self) -> None:
        """Unlink: engines that map the segment keep it, nobody can open it any more."""
        shm, self._shm, self._load = self._shm, None, None
        if shm is not None:
            shm.unlink()
            shm.close()


class ColocatedTransport:
    """Rank 0 writes each bucket once; every engine maps the same segment.

    Two segments alternate, so that one is filled while the engines load the other. Device tensors
    are staged through the host: correct on any device, slower than device IPC. Segments live only
    from the first ``send`` to ``finish`` or ``close``.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slots = (Slot(), Slot())
        self._next = 0

    @property
    def is_source(self) -> bool:
        return distributed.rank() == 0

    def connect(self, engines: EngineSet) -> None:
        """Nothing to prepare: engines find each segment by its name."""

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait(self._timeout_s)
        offsets, num_bytes = layout(bucket)
        shm = slot.reserve(num_bytes)
        fill(shm, bucket, offsets)
        ref = ShmRef(
            shm_name=shm.name.removeprefix("/"),
            num_bytes=num_bytes,
            entries=tuple(zip(bucket.specs, offsets, strict=True)),
        )
        slot.submitted(engines.submit_load(ref, version))

    def finish(self) -> None:
        for slot in self._slots:
            slot.wait(self._timeout_s)
        self.close()

    def close(self) -> None:
        for slot in self._slots:
            slot.release()


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


def _commit(shm: SharedMemory) -> None:
    """Make the system commit the memory now: writing to a full /dev/shm kills the process."""
    if not hasattr(os, "posix_fallocate"):
        return
    descriptor = _posixshmem.shm_open(f"/{shm.name}", os.O_RDWR, mode=0)
    try:
        os.posix_fallocate(descriptor, 0, shm.size)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no room for {shm.size} bytes of shared memory ({error.strerror}): enlarge /dev/shm "
            "(docker: --shm-size) or lower --update-weight-buffer-size",
        ) from error
    finally:
        os.close(descriptor)
