"""Weights through memory that trainer and engines share, for engines on the trainer's machine."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from miles.contracts.engine import EngineSet, WeightRef
from miles.contracts.types import WeightBucket
from miles.core import distributed
from miles.core.registry import Registry


class Segment(Protocol):
    """Shared memory that holds one bucket at a time."""

    def release(self) -> None:
        """Let the memory go. Idempotent."""
        ...


class HostSegment(Segment, Protocol):
    """On the host: engines find it by its name."""

    def write(
        self, bucket: WeightBucket, *, num_engines: int, gpus_per_engine: int
    ) -> Sequence[WeightRef]:
        """Hold this bucket instead of the one before; what each engine loads it from. Nobody reads
        the memory any more."""
        ...


SEGMENTS: Registry[Callable[[], HostSegment]] = Registry(
    "weight format",
    {
        "shm_bucket": "miles.weight_sync.shared_memory:ShmSegment",
        "flattened_bucket": "miles.weight_sync.flattened:FlattenedSegment",
    },
)


class Slot[S: Segment]:
    """A segment, and the loads that still read it."""

    def __init__(self, segment: S) -> None:
        self.segment = segment
        self._loads: Sequence[Future[None]] = ()

    def submitted(self, loads: Sequence["Future[None]"]) -> None:
        self._loads = loads

    def wait(self, timeout_s: float) -> None:
        loads, self._loads = self._loads, ()
        for load in loads:
            load.result(timeout_s)

    def release(self) -> None:
        self._loads = ()
        self.segment.release()


class ColocatedTransport:
    """Rank 0 writes each bucket once; every engine maps it.

    Two segments alternate, so that one is filled while the engines load the other. Device tensors
    are staged through the host: correct on any device, slower than ``device_ipc``. The memory is
    held only from the first ``send`` to ``finish`` or ``close``.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slots: tuple[Slot[HostSegment], ...] = ()
        self._next = 0

    @property
    def is_source(self) -> bool:
        return distributed.rank() == 0

    def connect(self, engines: EngineSet) -> None:
        """Choose the format; engines find each segment by its name."""
        self.close()
        make = SEGMENTS.load(engines.features().weight_format)
        self._slots = (Slot(make()), Slot(make()))

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait(self._timeout_s)
        refs = slot.segment.write(
            bucket, num_engines=len(engines.urls), gpus_per_engine=engines.gpus_per_engine
        )
        slot.submitted([engines.submit_load(ref, version, engine=i) for i, ref in enumerate(refs)])

    def finish(self) -> None:
        for slot in self._slots:
            slot.wait(self._timeout_s)
        self.close()

    def close(self) -> None:
        for slot in self._slots:
            slot.release()
