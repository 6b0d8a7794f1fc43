"""Who holds device memory in which phase: everybody always, or trainer and engines in turns."""

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, Protocol

from miles.config.offload import RolloutLevel
from miles.config.root import MilesConfig
from miles.contracts.engine import MemoryTag
from miles.core.timer import Timer
from miles.ray.rollout.engines import Engines
from miles.ray.train.group import TrainGroup

Phase = Literal["rollout", "train", "sync"]


class Memory(Protocol):
    """Each verb of the job runs inside ``phase``."""

    def phase(self, name: Phase) -> AbstractAsyncContextManager[None]: ...

    async def make_room_for_engines(self) -> None:
        """Let an engine start between two phases."""
        ...

    def take_seconds(self) -> dict[str, float]:
        """What the moves have taken since the last call, by their name."""
        ...


def released_tags(level: Collection[RolloutLevel]) -> frozenset[MemoryTag]:
    """Graphs always: they are of use only with both of the others."""
    named: dict[RolloutLevel, MemoryTag] = {"kv_cache": "kv_cache", "weight": "weights"}
    return frozenset({"cuda_graph", *(named[part] for part in level)})


class Resident:
    """Trainer and engines own separate devices: nobody moves."""

    @asynccontextmanager
    async def phase(self, name: Phase) -> AsyncGenerator[None]:
        del name
        yield

    async def make_room_for_engines(self) -> None:
        pass

    def take_seconds(self) -> dict[str, float]:
        return {}


class TakeTurns:
    """Moves between phases in an order that never holds both on the device.

    train: engines release what --offload-rollout-level says, then the trainer wakes. sync: the
    trainer sleeps (it sends from host memory), then engines take their weights back; after it their
    key/value cache and graphs. rollout: like the end of sync.
    """

    def __init__(self, trainer: TrainGroup, engines: Engines | None, config: MilesConfig) -> None:
        self._trainer = trainer
        self._engines = engines if config.offload.offload_rollout else None
        self._released = released_tags(config.offload.offload_rollout_level)
        self._trainer_sleeps = bool(config.offload.offload_train)
        self._trainer_awake = True
        self._timer = Timer()

    @asynccontextmanager
    async def phase(self, name: Phase) -> AsyncGenerator[None]:
        if name == "train":
            await self._release(self._released)
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

    def take_seconds(self) -> dict[str, float]:
        return self._timer.take()

    async def _release(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            with self._timer.span("engines_release"):
                await self._engines.release_memory(tags)

    async def _resume(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            with self._timer.span("engines_resume"):
                await self._engines.resume_memory(tags)

    async def _wake_trainer(self) -> None:
        if self._trainer_sleeps and not self._trainer_awake:
            with self._timer.span("trainer_wake_up"):
                await self._trainer.wake_up()
            self._trainer_awake = True

    async def _sleep_trainer(self) -> None:
        if self._trainer_sleeps and self._trainer_awake:
            with self._timer.span("trainer_sleep"):
                await self._trainer.sleep()
            self._trainer_awake = False
