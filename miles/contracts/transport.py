"""The seam between weight sync and the ways weights can travel."""

from typing import Protocol

from miles.contracts.engine import EngineSet
from miles.contracts.types import WeightBucket


class WeightTransport(Protocol):
    """Moves buckets into engines. It never sees a model, a backend or a flag.

    A transport owns the order of "move bytes" and "engine loads": broadcast starts the engines'
    receive before it sends; shared memory keeps the bucket alive until it is loaded.
    """

    @property
    def is_source(self) -> bool:
        """Whether this rank sends. On ranks that do not, each tensor is dropped at once and only
        ``close`` is called. Ranks that do send the same buckets in the same order."""
        ...

    def connect(self, engines: EngineSet) -> None:
        """Prepare for these engines; called before the first update and when they change."""
        ...

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        """Deliver one bucket; may return before the engines have loaded it."""
        ...

    def finish(self) -> None:
        """Return when every bucket sent is loaded; raise ``EngineError`` when one is not."""
        ...

    def close(self) -> None:
        """Release groups and shared memory; also after a failed update. Idempotent."""
        ...
