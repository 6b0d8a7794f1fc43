"""Keeps engines alive while something waits for them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from miles.config.rollout import RolloutConfig
from miles.core import logging
from miles.ray.errors import JobError
from miles.ray.rollout.engine_factory import EngineGroup
from miles.ray.rollout.router import Router

logger = logging.get(__name__)

POLL_S = 1.0
MAX_RESTARTS = 8


class EngineSupervisor:
    """Replaces engines whose process ended or that no longer answer.

    A new engine starts from the checkpoint's weights, so ``heal`` (weight sync, then telling the
    pool) runs before it serves. Requests of the old one wait in the pool meanwhile.
    """

    def __init__(
        self,
        engines: EngineGroup,
        router: Router | None,
        options: RolloutConfig,
        heal: Callable[[], Awaitable[None]],
    ) -> None:
        self._engines = engines
        self._router = router
        self._options = options
        self._heal = heal
        self._restarts = 0
        self._last_probe = time.monotonic()

    async def watch[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, replacing engines that fail while it runs."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                failed = await self._failed()
                if failed:
                    await self._restart(failed)
                    await self.with_all_engines(self._heal)
        finally:
            task.cancel()

    async def with_all_engines(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do ``work``, which needs every engine and gives them weights: replace those that have
        ended before, and when it fails because one ended or hangs, replace that and do it again.

        Returns whether any was replaced: the caller tells the pool.
        """
        failed, replaced = await self._engines.find_dead(), False
        while True:
            await self._restart(failed)
            replaced = replaced or bool(failed)
            try:
                await work()
            except JobError as error:
                failed = await self._failed_after_error()
                if not failed:
                    raise
                logger.warning("%s; once more with new engines", error)
            else:
                return replaced

    async def _failed_after_error(self) -> list[int]:
        dead = await self._engines.find_dead_soon()
        if dead:
            return dead
        return await self._engines.find_hung(self._options.rollout_health_check_timeout)

    async def _failed(self) -> list[int]:
        if self._router is not None:
            await self._router.require_alive()
        dead = await self._engines.find_dead()
        interval = self._options.rollout_health_check_interval
        if dead or not interval or time.monotonic() - self._last_probe < interval:
            return dead
        self._last_probe = time.monotonic()
        return await self._engines.find_unhealthy(self._options.rollout_health_check_timeout)

    async def _restart(self, positions: list[int]) -> None:
        if self._router is not None:
            # All of them first: a restart takes a while, in which no request should go there.
            for index in positions:
                await self._router.remove(self._engines.addresses.urls[index])
        for index in positions:
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                raise JobError(
                    f"engine {index} ended again after {MAX_RESTARTS} restarts in this run; its "
                    f"log: {self._engines.log_file(index)}"
                )
            logger.warning("engine %d ended or hangs: restarting it", index)
            await self._engines.restart(index)
