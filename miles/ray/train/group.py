"""``TrainGroup``: the trainer ranks as one object; fans the six methods out."""

from collections.abc import Mapping
from typing import Any

from miles.config.derived import needs_reference
from miles.config.root import MilesConfig
from miles.contracts.types import TrainStats
from miles.ray.errors import JobError, call, call_all, kill
from miles.ray.placement import Layout, Placement
from miles.ray.train.actor_factory import create_actors
from miles.rollout.engine_set import EngineAddresses


class TrainGroup:
    """All ranks of one model. Every method waits for every rank, and fails with the first."""

    def __init__(self, config: MilesConfig, layout: Layout, placement: Placement) -> None:
        self._config = config
        self._actors = create_actors(config, layout, placement)
        self._dp_ranks: list[int] = []
        self._peaks: dict[str, int] = {}

    @property
    def dp_size(self) -> int:
        return max(self._dp_ranks) + 1

    async def init(self) -> int:
        """Join the ranks, build the model; return the first rollout id to run."""
        address = await call("trainer 0", self._actors[0].host_rendezvous.remote(), during="start")
        world_size = len(self._actors)
        await call_all(
            {
                f"trainer {rank}": actor.prepare.remote(rank, world_size, address)
                for rank, actor in enumerate(self._actors)
            },
            during="start",
        )
        with_ref = needs_reference(self._config)
        first = await self._all("init", self._config, with_ref=with_ref, during="start")
        if len(set(first)) != 1:
            raise JobError(f"trainer ranks disagree on where to start: {first}")
        self._dp_ranks = await self._all("dp_rank", during="start")
        return first[0]

    async def train(self, rollout_id: int, shards: list[Any]) -> TrainStats:
        """``shards[i]`` is the store reference for data-parallel rank i."""
        answers = await call_all(
            {
                f"trainer {rank}": actor.measured.remote(
                    "train", rollout_id, shards[self._dp_ranks[rank]]
                )
                for rank, actor in enumerate(self._actors)
            },
            during=f"training of rollout {rollout_id}",
        )
        return self._first("train", answers)

    async def update_weights(
        self, engines: EngineAddresses, *, during: str
    ) -> tuple[int, Mapping[str, float]]:
        """The new version, and rank 0's seconds by phase."""
        answers = await self._all("measured", "update_weights_at", engines, during=during)
        return self._first("update_weights", answers)

    async def save_model(self, rollout_id: int, *, force_sync: bool) -> None:
        answers = await self._all(
            "measured",
            "save_model",
            rollout_id,
            force_sync=force_sync,
            during=f"saving after rollout {rollout_id}",
        )
        self._first("save", answers)

    def take_memory_peaks(self) -> dict[str, int]:
        """The most bytes that PyTorch held on any rank's device in each phase (``train``,
        ``update_weights``, ``save``) since the last call; empty without accelerators."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._all("sleep", keep_weights=keep_weights, during="sleep")

    async def wake_up(self) -> None:
        await self._all("wake_up", during="wake-up")

    async def shutdown(self) -> None:
        await self._all("shutdown", during="shutdown")

    def kill(self) -> None:
        for actor in self._actors:
            kill(actor)

    def _first(self, phase: str, answers: list[tuple[Any, int]]) -> Any:
        """Rank 0's answer; what all ranks held on their devices is kept for the metrics."""
        peak = max(peak for _, peak in answers)
        if peak:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
        return answers[0][0]

    async def _all(self, method: str, *args: Any, during: str, **kwargs: Any) -> list[Any]:
        return await call_all(
            {
                f"trainer {rank}": getattr(actor, method).remote(*args, **kwargs)
                for rank, actor in enumerate(self._actors)
            },
            during=during,
        )
