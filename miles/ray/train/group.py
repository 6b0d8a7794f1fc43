"""``TrainGroup``: the trainer ranks as one object; fans the six methods out."""

from collections.abc import Callable, Sequence
from typing import Any

from miles.config.derived import needs_reference
from miles.config.root import MilesConfig
from miles.contracts.types import TrainStats
from miles.ray.errors import JobError, call, call_all, kill
from miles.ray.placement import Layout, Placement
from miles.ray.train.actor_factory import Measured, WeightUpdate, create_actors
from miles.rollout.engine_set import EngineAddresses


class TrainGroup:
    """All ranks of one model. Every method waits for every rank, and fails with the first."""

    def __init__(self, config: MilesConfig, layout: Layout, placement: Placement) -> None:
        self._actors = create_actors(config, layout, placement)
        self._dp_ranks: list[int] = []
        self._peaks: dict[str, int] = {}

    @property
    def dp_size(self) -> int:
        return max(self._dp_ranks) + 1

    async def join(self) -> None:
        """Wait until every process is there, and let them know of each other."""
        address = await call("trainer 0", self._actors[0].host_rendezvous.remote(), during="start")
        world_size = len(self._actors)
        await self._each(
            lambda rank, actor: actor.prepare.remote(rank, world_size, address), during="start"
        )

    async def init(self, config: MilesConfig) -> int:
        """Build the model; return the first rollout id to run. ``config`` may know more than the
        one that the processes were started with."""
        with_ref = needs_reference(config)
        first = await self._each(
            lambda _, actor: actor.init.remote(config, with_ref=with_ref), during="start"
        )
        if len(set(first)) != 1:
            raise JobError(f"trainer ranks disagree on where to start: {first}")
        self._dp_ranks = await self._each(lambda _, actor: actor.dp_rank.remote(), during="start")
        return first[0]

    async def train(self, rollout_id: int, shards: list[Any]) -> TrainStats:
        """``shards[i]`` is the store reference for data-parallel rank i."""
        answers = await self._each(
            lambda rank, actor: actor.train.remote(rollout_id, shards[self._dp_ranks[rank]]),
            during=f"training of rollout {rollout_id}",
        )
        return self._first("train", answers)

    async def update_weights(self, engines: EngineAddresses, *, during: str) -> WeightUpdate:
        """The new version, and rank 0's seconds by phase."""
        answers = await self._each(
            lambda _, actor: actor.update_weights.remote(engines), during=during
        )
        return self._first("update_weights", answers)

    async def save_model(self, rollout_id: int, *, force_sync: bool) -> None:
        answers = await self._each(
            lambda _, actor: actor.save_model.remote(rollout_id, force_sync=force_sync),
            during=f"saving after rollout {rollout_id}",
        )
        self._first("save", answers)

    def take_memory_peaks(self) -> dict[str, int]:
        """The most bytes that PyTorch held on any rank's device in each phase (``train``,
        ``update_weights``, ``save``) since the last call; empty without accelerators."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._each(
            lambda _, actor: actor.sleep.remote(keep_weights=keep_weights), during="sleep"
        )

    async def wake_up(self) -> None:
        await self._each(lambda _, actor: actor.wake_up.remote(), during="wake-up")

    async def shutdown(self) -> None:
        await self._each(lambda _, actor: actor.shutdown.remote(), during="shutdown")

    def kill(self) -> None:
        for actor in self._actors:
            kill(actor)

    def _first[T](self, phase: str, answers: Sequence[Measured[T]]) -> T:
        """Rank 0's answer; what all ranks held on their devices is kept for the metrics."""
        peak = max(peak for _, peak in answers)
        if peak:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
        return answers[0][0]

    async def _each(self, start: Callable[[int, Any], Any], *, during: str) -> list[Any]:
        """Answers of all ranks, in their order, to the call that ``start`` makes of each actor."""
        calls = {f"trainer {rank}": start(rank, one) for rank, one in enumerate(self._actors)}
        return await call_all(calls, during=during)
