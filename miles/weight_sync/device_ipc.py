"""Weights through device memory that trainer and engines share: rank r and the engine's process on
its device.
"""

from collections.abc import Callable, Sequence

from miles.contracts.engine import EngineSet, FlattenedRef
from miles.contracts.types import WeightBucket
from miles.core import distributed
from miles.weight_sync.colocated import Slot
from miles.weight_sync.flattened import DeviceSegment


class DeviceIpcTransport:
    """Every rank writes each bucket on its device; rank 0 tells the engines where.

    Rank ``r`` shares its device with process ``r % gpus_per_engine`` of engine
    ``r // gpus_per_engine``, as the layout places them. Two segments alternate, so that one is
    filled while the engines load the other; they are held only from the first ``send`` to
    ``finish`` or ``close``.
    """

    is_source = True

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slots = (Slot(DeviceSegment()), Slot(DeviceSegment()))
        self._next = 0

    def connect(self, engines: EngineSet) -> None:
        """Raises ``ValueError`` when ranks and engine processes do not share devices in pairs."""
        ranks, size = distributed.world_size(), engines.gpus_per_engine
        processes = size * (1 + max(_positions(engines)))
        # Newcomers alone do not tell how many engines there are.
        if processes > ranks or (engines.newcomers is None and processes < ranks):
            raise ValueError(
                f"{ranks} trainer ranks and engines on {processes} devices: with --colocate each "
                "rank shares its device with one process of an engine"
            )

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        # Rank 0 alone has loads to wait for; nobody overwrites what an engine still reads.
        self._wait(slot)
        handles = _on_every_rank(lambda: slot.segment.write(bucket), "sharing device memory")
        if distributed.rank() != 0:
            return
        size = engines.gpus_per_engine
        refs = [
            FlattenedRef(serialized=tuple(handles[position * size : (position + 1) * size]))
            for position in _positions(engines)
        ]
        slot.submitted([engines.submit_load(ref, version, engine=i) for i, ref in enumerate(refs)])

    def finish(self) -> None:
        for slot in self._slots:
            self._wait(slot)
        self.close()

    def close(self) -> None:
        for slot in self._slots:
            slot.release()

    def _wait(self, slot: Slot[DeviceSegment]) -> None:
        _on_every_rank(lambda: slot.wait(self._timeout_s), "waiting for the engines")


def _positions(engines: EngineSet) -> Sequence[int]:
    """Among all engines of the job, by which they share devices with ranks."""
    return range(len(engines.urls)) if engines.newcomers is None else engines.newcomers


def _on_every_rank[T](work: Callable[[], T], what: str) -> list[T]:
    """Each rank's result, on all of them; they fail together."""
    results: list[T] = []
    error = distributed.error_of(lambda: results.append(work()))
    distributed.raise_together(error, f"weight update ({what})")
    return distributed.gather_objects(results[0])
