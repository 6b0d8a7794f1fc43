"""Who holds device memory in which phase: everybody always, or trainer and engines in turns."""

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, Protocol

from miles.config.root import MilesConfig
from miles.contracts.engine import MemoryTag
from miles.ray.rollout.engines import Engines
from miles.ray.train.group import TrainGroup

Phase = Literal["rollout", "train", "sync"]


class Memory(Protocol):
    """Each verb of the job runs inside ``phase``."""

    def phase(self, name: Phase) -> AbstractAsyncContextManager[None]: ...

    async def make_room_for_engines(self) -> None:
        """Let an engine start between two phases."""
        ...


class Resident:
    """Trainer and engines own separate devices: nobody moves."""

    @asynccontextmanager
    async def phase(self, name: Phase) -> AsyncGenerator[None]:
        del name
        yield

    async def make_room_for_engines(self) -> None:
        pass


class TakeTurns:
    """Moves between phases in an order that never holds both on the device.

    train: engines release everything, then the trainer wakes. sync: the trainer sleeps (it sends
    from host memory), then engines take their weights back; after it their key/value cache and
    graphs. rollout: like the end of sync.
    """

    def __init__(self, trainer: TrainGroup, engines: Engines | None, config: MilesConfig) -> None:
        self._trainer = trainer
        self._engines = engines if config.offload.offload_rollout else None
        self._trainer_sleeps = bool(config.offload.offload_train)
        self._trainer_awake = True

    @asynccontextmanager
    async def phase(self, name: Phase) -> AsyncGenerator[None]:
        if name == "train":
            await self._release({"weights", "kv_cache", "cuda_graph"})
            await self._wake_trainer()
            yield
            return
        await self._sleep_trainer()
        await self._resume({"weights"})
        if name == "rollout":
            await self._resume({"kv_cache", "cuda_graph"})
        yield
        if name == "sync":
            await self._resume({"kv_cache", "cuda_graph"})

    async def make_room_for_engines(self) -> None:
        await self._sleep_trainer()

    async def _release(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            await self._engines.release_memory(tags)

    async def _resume(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            await self._engines.resume_memory(tags)

    async def _wake_trainer(self) -> None:
        if self._trainer_sleeps and not self._trainer_awake:
            await self._trainer.wake_up()
            self._trainer_awake = True

    async def _sleep_trainer(self) -> None:
        if self._trainer_sleeps and self._trainer_awake:
            await self._trainer.sleep()
            self._trainer_awake = False
