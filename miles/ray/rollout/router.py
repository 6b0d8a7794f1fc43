"""The router in front of a job's engines: a process of the job's own, or one that runs already."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles.backends.sglang_utils.package import choose_engine
from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError
from miles.core import logging
from miles.ray.errors import JobError, call, kill
from miles.ray.rollout.engine_holder import EngineHolder
from miles.ray.rollout.engine_launch import router_launch
from miles.rollout.engine_client import http_url
from miles.rollout.router_client import RouterClient

logger = logging.get(__name__)

REGISTER_TIMEOUT_S = 60.0


class Router:
    """Sends every request of the job to one of the engines that were registered here.

    Its process is where the driver is, and so the rollout manager, which alone sends requests.
    Failures are ``JobError``.
    """

    def __init__(self, config: MilesConfig, log_dir: Path) -> None:
        self._config = config
        self._log_file = log_dir / "router.log"
        self._holder: Any = None
        self._client: RouterClient | None = None
        self._registered: set[str] = set()

    @property
    def url(self) -> str:
        assert self._client is not None
        return self._client.url

    async def start(self) -> None:
        """Start it, or find the external one; returns when it answers."""
        rollout = self._config.rollout
        if rollout.sglang_router_ip is not None and rollout.sglang_router_port is not None:
            url = http_url(rollout.sglang_router_ip, rollout.sglang_router_port)
            self._client = RouterClient(url, timeout_s=REGISTER_TIMEOUT_S)
            await self._require_no_other_engines()
            return
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": 2}
        self._holder = ray.remote(EngineHolder).options(**options).remote("the router")
        launch = router_launch(self._config, self._log_file)
        url = await call("router", self._holder.start.remote(launch), during="start")
        self._client = RouterClient(url, timeout_s=REGISTER_TIMEOUT_S)

    async def use(self, urls: Sequence[str]) -> None:
        """Send requests to these engines, which must be healthy, and to no others of this job."""
        assert self._client is not None
        try:
            for url in self._registered - set(urls):
                await self.remove(url)
            await asyncio.gather(*(self._client.add(url) for url in urls))
        except EngineError as error:
            raise JobError(f"engines could not be registered: {error}") from error
        self._registered |= set(urls)

    async def remove(self, url: str) -> None:
        """Send nothing more to an engine that ended or hangs. Not registered: nothing to do."""
        if url not in self._registered:
            return
        assert self._client is not None
        try:
            await self._client.remove(url)
        except EngineError as error:
            raise JobError(f"an engine could not be removed: {error}") from error
        self._registered.discard(url)

    async def require_alive(self) -> None:
        """Raises ``JobError`` with its last lines when the job's own router has ended."""
        if self._holder is None:
            return
        if not await call("router", self._holder.alive.remote(), during="a rollout"):
            lines = await call("router", self._holder.last_lines.remote(), during="a rollout")
            raise JobError(f"the router ended; its log is {self._log_file}:\n{lines}")

    async def stop(self) -> None:
        """End the job's own; of an external one take the engines out."""
        if self._holder is not None:
            await asyncio.gather(self._holder.stop.remote(), return_exceptions=True)
            return
        for url in sorted(self._registered):
            try:
                await self.remove(url)
            except JobError as error:
                logger.warning("%s", error)
                return

    def kill(self) -> None:
        if self._holder is not None:
            kill(self._holder)

    async def _require_no_other_engines(self) -> None:
        """Requests of the job would reach them, and they have other weights."""
        assert self._client is not None
        flags = "--sglang-router-ip, --sglang-router-port"
        try:
            others = await self._client.workers()
        except EngineError as error:
            raise JobError(f"{flags}: {error}") from error
        if others:
            raise JobError(
                f"{flags}: the router {self.url} has engines already ({', '.join(others)}), which "
                "would answer with weights that are not this job's; remove them, or give every job "
                "a router of its own"
            )


def make_router(config: MilesConfig, log_dir: Path) -> Router | None:
    """``None`` where the engines are embedded ones, among which the pool chooses itself."""
    return Router(config, log_dir) if choose_engine(config)[0] == "sglang" else None
