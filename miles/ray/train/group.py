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
        stats = await call_all(
            {
                f"trainer {rank}": actor.train.remote(rollout_id, shards[self._dp_ranks[rank]])
                for rank, actor in enumerate(self._actors)
            },
            during=f"training of rollout {rollout_id}",
        )
        return stats[0]

    async def update_weights(
        self, engines: EngineAddresses, *, during: str
    ) -> tuple[int, Mapping[str, float]]:
        """The new version, and rank 0's seconds by phase."""
        answers = await self._all("update_weights_at", engines, during=during)
        return answers[0]

    async def save_model(self, rollout_id: int, *, force_sync: bool) -> None:
        await self._all(
            "save_model",
            rollout_id,
            force_sync=force_sync,
            during=f"saving after rollout {rollout_id}",
        )

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._all("sleep", keep_weights=keep_weights, during="sleep")

    async def wake_up(self) -> None:
        await self._all("wake_up", during="wake-up")

    async def shutdown(self) -> None:
        await self._all("shutdown", during="shutdown")

    def kill(self) -> None:
        for actor in self._actors:
            kill(actor)

    async def _all(self, method: str, *args: Any, during: str, **kwargs: Any) -> list[Any]:
        return await call_all(
            {
                f"trainer {rank}": getattr(actor, method).remote(*args, **kwargs)
                for rank, actor in enumerate(self._actors)
            },
            during=during,
        )
