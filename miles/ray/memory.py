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
_TrainerState = Literal["awake", "weights", "asleep"]
"""What a trainer has on its devices: all, its weights alone, or nothing."""


class Memory(Protocol):
    """Each verb of the job runs inside ``phase``."""

    def phase(self, name: Phase) -> AbstractAsyncContextManager[None]: ...

    async def make_room_for_engines(self) -> None:
        """Let an engine start, between two phases or in one for engines."""
        ...

    def weights_at_hand(self) -> AbstractAsyncContextManager[None]:
        """While engines generate: the trainer can send its weights in here."""
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

    @asynccontextmanager
    async def weights_at_hand(self) -> AsyncGenerator[None]:
        yield

    def take_seconds(self) -> dict[str, float]:
        return {}


class TakeTurns:
    """Moves between phases in an order that never holds both on the device.

    train: engines release what --offload-rollout-level says, then the trainer wakes. sync: all of
    the trainer sleeps but its weights, then engines take theirs back; after it the trainer's leave
    too, and engines have their key/value cache and graphs again. rollout: like the end of sync.
    """

    def __init__(self, trainer: TrainGroup, engines: Engines, config: MilesConfig) -> None:
        self._trainer = trainer
        self._engines = engines if config.offload.offload_rollout else None
        self._released = released_tags(config.offload.offload_rollout_level)
        self._trainer_sleeps = bool(config.offload.offload_train)
        self._drops_weights = config.offload.rematerialize_param_from_master_weight
        self._state: _TrainerState = "awake"
        self._has_weights = True
        self._timer = Timer()

    @asynccontextmanager
    async def phase(self, name: Phase) -> AsyncGenerator[None]:
        if name == "train":
            await self._release(self._released)
            await self._wake_trainer()
            yield
            return
        if name == "sync":
            await self._prepare_to_send()
        else:
            await self._sleep_trainer()
        await self._resume({"weights"})
        if name == "rollout":
            await self._resume({"kv_cache", "cuda_graph"})
        yield
        if name == "sync":
            await self._sleep_trainer()
            await self._resume({"kv_cache", "cuda_graph"})

    async def make_room_for_engines(self) -> None:
        await self._sleep_trainer()

    @asynccontextmanager
    async def weights_at_hand(self) -> AsyncGenerator[None]:
        if not self._has_weights:
            await self._prepare_to_send()
        yield
        await self._sleep_trainer()

    def take_seconds(self) -> dict[str, float]:
        return self._timer.take()

    async def _prepare_to_send(self) -> None:
        if not self._has_weights:
            # Those that it does not keep are made from what only a trainer that is awake has.
            await self._wake_trainer()
        # One that sleeps already, when an engine was replaced, sends from where its copies lie.
        await self._sleep_trainer(keep_weights=True)

    async def _release(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            with self._timer.span("engines_release"):
                await self._engines.release_memory(tags)

    async def _resume(self, tags: Collection[MemoryTag]) -> None:
        if self._engines is not None:
            with self._timer.span("engines_resume"):
                await self._engines.resume_memory(tags)

    async def _wake_trainer(self) -> None:
        if self._trainer_sleeps and self._state != "awake":
            with self._timer.span("trainer_wake_up"):
                await self._trainer.wake_up()
            self._state, self._has_weights = "awake", True

    async def _sleep_trainer(self, *, keep_weights: bool = False) -> None:
        wanted: _TrainerState = "weights" if keep_weights else "asleep"
        if self._trainer_sleeps and self._state not in ("asleep", wanted):
            with self._timer.span("trainer_sleep"):
                await self._trainer.sleep(keep_weights=keep_weights)
            if (self._state, wanted) == ("weights", "asleep"):
                self._has_weights = not self._drops_weights
            self._state = wanted
