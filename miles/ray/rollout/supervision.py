"""Keeps engines alive while something waits for them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from miles.config.rollout import RolloutConfig
from miles.core import logging
from miles.ray.errors import JobError
from miles.ray.rollout.engines import Engines, find_dead_soon
from miles.ray.rollout.router import Router

logger = logging.get(__name__)

POLL_S = 1.0


class EngineSupervisor:
    """Replaces engines whose process ended or that no longer answer, or without
    ``--use-fault-tolerance`` ends the run with the first one whose process did.

    A new engine, or one that is back, has not the trainer's weights, so ``heal`` (weight sync, then
    ``connect``) runs before it serves, and ``make_room`` before it starts. ``connect`` tells router
    and pool which engines there are. Requests of a lost one wait in the pool meanwhile, or go to
    others.
    """

    def __init__(
        self,
        engines: Engines,
        router: Router | None,
        options: RolloutConfig,
        *,
        make_room: Callable[[], Awaitable[None]],
        heal: Callable[[], Awaitable[None]],
        connect: Callable[[], Awaitable[None]],
    ) -> None:
        self._engines = engines
        self._router = router
        self._options = options
        self._make_room = make_room
        self._heal = heal
        self._connect = connect
        self._last_probe = self._began = time.monotonic()
        self._num_replaced = 0

    def take_num_replaced(self) -> int:
        """How many engines were replaced since the last call."""
        count, self._num_replaced = self._num_replaced, 0
        return count

    async def watch[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, replacing engines that fail while it runs."""
        self._began = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                failed = await self._failed()
                new = await self._replace(failed)
                if await self._engines.readmit() or new:
                    await self.with_all_engines(self._heal)
                elif failed:
                    await self._connect()
        finally:
            task.cancel()

    async def with_all_engines(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do ``work``, which needs every engine and gives them weights: replace those that have
        ended before, and when it fails because one ended or hangs, replace that and do it again.

        Returns whether the engines are others now: the caller connects.
        """
        failed = await self._engines.find_dead()
        changed = await self._engines.readmit()
        while True:
            await self._replace(failed)
            changed = changed or bool(failed)
            try:
                await work()
            except JobError as error:
                failed = await self._failed_after_error()
                if not failed:
                    raise
                self._require_tolerance(failed, error)
                logger.warning("%s; once more with the engines that there are then", error)
            else:
                return changed

    async def _failed_after_error(self) -> list[int]:
        dead = await find_dead_soon(self._engines)
        if dead or not self._options.use_fault_tolerance:
            return dead
        return await self._engines.find_hung(self._options.rollout_health_check_timeout)

    async def _failed(self) -> list[int]:
        if self._router is not None:
            await self._router.require_alive()
        dead = await self._engines.find_dead()
        if dead or not self._probe_is_due():
            return dead
        self._last_probe = time.monotonic()
        return await self._engines.find_unhealthy(self._options.rollout_health_check_timeout)

    def _probe_is_due(self) -> bool:
        interval = self._options.rollout_health_check_interval
        if not interval or not self._options.use_fault_tolerance:
            return False
        first_wait = self._options.rollout_health_check_first_wait
        now = time.monotonic()
        return now - self._last_probe >= interval and now - self._began >= first_wait

    def _require_tolerance(self, failed: Sequence[int], error: JobError | None = None) -> None:
        if self._options.use_fault_tolerance or not failed:
            return
        names = ", ".join(map(self._engines.name, failed))
        raise JobError(
            f"{names} ended, and with it the run (--no-use-fault-tolerance), which goes on from "
            "its last checkpoint with --load"
        ) from error

    async def _replace(self, failed: Sequence[int]) -> bool:
        """Whether there are engines now that have not the trainer's weights. Raises ``JobError``
        for those that failed where none is to be replaced."""
        self._require_tolerance(failed)
        if self._router is not None:
            # Before anything else: a restart takes a while, in which no request should go there.
            for index in failed:
                await self._router.remove(self._engines.url(index))
        if not failed:
            return False
        await self._make_room()
        replaced = await self._engines.replace(failed)
        self._num_replaced += len(failed) if replaced else 0
        return replaced
