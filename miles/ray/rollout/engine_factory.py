"""The engines that a job starts: servers on its slots, and the memory that each has given up."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError, MemoryTag
from miles.core import logging
from miles.ray.errors import JobError, gather
from miles.ray.placement import Layout, Placement
from miles.ray.rollout.engine_launch import choose_launcher, serves_on_loopback
from miles.ray.rollout.engines import find_dead_soon, find_silent, only
from miles.ray.rollout.launched_engine import LaunchedEngine
from miles.rollout.engine_client import EngineClient
from miles.rollout.engine_set import EngineAddresses

logger = logging.get(__name__)

MAX_RESTARTS, WITHIN_S = 8, 3600.0
"""Of one engine: what ends more often than that in so many seconds will end again."""
DRAIN_S = 10.0
"""For what engines may still generate when they are to give up memory; usually nothing."""


class EngineGroup:
    """Implements ``engines.Engines``.

    Raises ``JobError`` for a placement that they cannot serve.
    """

    def __init__(
        self, config: MilesConfig, layout: Layout, placement: Placement, log_dir: Path
    ) -> None:
        self._config = config
        launch = partial(choose_launcher(config, layout, placement), config)
        loopback = serves_on_loopback(config, placement, ray.util.get_node_ip_address())
        self._engines = [
            LaunchedEngine(index, slots, placement, launch, log_dir, loopback=loopback)
            for index, slots in enumerate(layout.engine_slots)
        ]
        self._generation = 0
        self._restarts = [deque[float](maxlen=MAX_RESTARTS) for _ in self._engines]
        """When each engine was restarted last, by ``time.monotonic()``."""
        self._released: list[set[MemoryTag]] = [set() for _ in self._engines]
        """The memory that each engine has given up."""
        self._newcomers = set(self._positions())

    @property
    def addresses(self) -> EngineAddresses:
        return EngineAddresses(
            urls=tuple(engine.url for engine in self._engines),
            gpus_per_engine=self._config.cluster.rollout_num_gpus_per_engine,
            generation=self._generation,
        )

    @property
    def newcomers(self) -> EngineAddresses:
        return only(self.addresses, self._positions(), self._newcomers)

    def weights_given(self) -> None:
        self._newcomers.clear()

    def url(self, index: int) -> str:
        return self._engines[index].url

    def name(self, index: int) -> str:
        return f"engine {index} (its log is {self._engines[index].log_file})"

    async def start(self) -> None:
        await gather(*(engine.start() for engine in self._engines))
        logger.info("engines serve at %s", " ".join(self.addresses.urls))

    async def find_dead(self) -> list[int]:
        """Positions of engines of which a process has ended (a holder or a server)."""
        alive = await asyncio.gather(*(engine.alive() for engine in self._engines))
        return [index for index, answer in enumerate(alive) if not answer]

    async def find_unhealthy(self, timeout_s: float) -> list[int]:
        return await find_silent(self._positions(), EngineClient.health, timeout_s)

    async def find_hung(self, timeout_s: float) -> list[int]:
        return await find_silent(self._positions(), EngineClient.server_info, timeout_s)

    async def replace(self, failed: Sequence[int]) -> bool:
        for index in failed:
            self._require_patience(index)
            logger.warning("engine %d ended or hangs: restarting it", index)
        await gather(*(self.restart(index) for index in failed))
        return bool(failed)

    async def readmit(self) -> bool:
        """None: those that fail are replaced at once."""
        return False

    async def restart(self, index: int) -> None:
        """Replace an engine. It comes up with the checkpoint's weights: sync before using it.

        It gives up the memory that the old one had given up.
        """
        released = self._released[index]
        self._released[index] = set()
        await self._engines[index].restart()
        self._newcomers.add(index)
        self._generation += 1
        await self._release(index, released)

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that holds it; one that has ended holds none."""
        await self._each(lambda index: self._release(index, set(tags)))

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that has given it up."""
        await self._each(lambda index: self._resume(index, set(tags)))

    async def pids(self) -> list[int | None]:
        """Of every server, engine by engine."""
        found = await asyncio.gather(*(engine.pids() for engine in self._engines))
        return [pid for pids in found for pid in pids]

    async def stop(self) -> None:
        """End every server."""
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def kill(self) -> None:
        for engine in self._engines:
            engine.kill()

    def _positions(self) -> dict[int, str]:
        return {index: engine.url for index, engine in enumerate(self._engines)}

    def _require_patience(self, index: int) -> None:
        restarts, now = self._restarts[index], time.monotonic()
        if len(restarts) == MAX_RESTARTS and now - restarts[0] < WITHIN_S:
            raise JobError(
                f"{self.name(index)} ended again after {MAX_RESTARTS} restarts within "
                f"{WITHIN_S / 60:g} minutes"
            )
        restarts.append(now)

    async def _each(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """For every engine; one that fails does not keep the others from it."""
        results = await asyncio.gather(
            *map(work, range(len(self._engines))), return_exceptions=True
        )
        for error in results:
            if error is not None:
                raise error

    async def _release(self, index: int, tags: set[MemoryTag]) -> None:
        missing = tags - self._released[index]
        if not missing:
            return
        try:
            async with self._client(index) as client:
                # SGLang ends at a release that meets a request.
                await client.drain(DRAIN_S)
                await client.release_memory(sorted(missing))
        except JobError as error:
            if index not in await find_dead_soon(self):
                raise
            logger.warning("engine %d has ended: %s", index, error)
        self._released[index] |= missing

    async def _resume(self, index: int, tags: set[MemoryTag]) -> None:
        if held := tags & self._released[index]:
            async with self._client(index) as client:
                await client.resume_memory(sorted(held))
            self._released[index] -= held

    @asynccontextmanager
    async def _client(self, index: int) -> AsyncGenerator[EngineClient]:
        """For one call about memory, whose failure is a ``JobError``."""
        timeout_s = self._config.weight_sync.update_weight_timeout_s
        client = EngineClient(self._engines[index].url, timeout_s=timeout_s)
        try:
            yield client
        except EngineError as error:
            raise JobError(f"engine {index} failed to give up or take memory: {error}") from error
        finally:
            await client.close()
