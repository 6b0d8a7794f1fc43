"""Engine server processes, each held by a Ray actor on its slot, and the group of them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError, MemoryTag
from miles.core import logging
from miles.ray.errors import DEATH_NOTICE_S, JobError, call, gather, kill
from miles.ray.placement import Layout, Placement
from miles.ray.rollout.engine_launch import EngineLaunch, choose_launcher, require_one_machine
from miles.rollout.engine_client import EngineClient
from miles.rollout.engine_set import EngineAddresses

logger = logging.get(__name__)

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
SHARE_OF_A_SLOT = 0.2
LAST_LINES = 15


class EngineHolder:
    """Ray actor that owns one server process, an engine's or the router's; when it ends, so does
    the server."""

    def __init__(self, what: str) -> None:
        """``what`` the server is, for messages."""
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file = Path(os.devnull)

    def start(self, launch: EngineLaunch) -> str:
        """Start the server and return its URL once it is ready."""
        self._log_file = Path(launch.log_file)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="miles-engine-") as folder:
            ready = Path(folder) / "ready.json"
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [*launch.command, "--ready-file", str(ready), "--parent-pid", str(os.getpid())],
                    env={**os.environ, **launch.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            return self._wait_until_ready(ready)

    def alive(self) -> bool:
        """Does not reap a server that ended: until ``stop`` its process group keeps its id."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is None
        except ChildProcessError:  # `stop`, in the other thread, has just reaped it.
            return False

    def last_lines(self) -> str:
        """The server's own last words."""
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the server with all its processes: politely, then for good."""
        if self._process is None or self._process.returncode is not None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if self.alive():
            os.kill(self._process.pid, signal.SIGTERM)
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)

    def _wait_until_ready(self, ready: Path) -> str:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            if not self.alive():
                self.stop()
                raise RuntimeError(f"{self._what} ended at start:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self._what} was not ready in {READY_TIMEOUT_S:g} s")
            time.sleep(0.05)
        return json.loads(ready.read_text(encoding="utf-8"))["url"]


class EngineGroup:
    """All engines of a job. Raises ``JobError`` for a placement that they cannot serve."""

    def __init__(
        self, config: MilesConfig, layout: Layout, placement: Placement, log_dir: Path
    ) -> None:
        self._config = config
        require_one_machine(placement, ray.util.get_node_ip_address())
        self._launch = choose_launcher(config, placement)
        self._placement = placement
        self._log_dir = log_dir
        self._slots = layout.engine_slots
        self._holders = [self._new_holder(index) for index in range(len(self._slots))]
        self._urls: list[str] = [""] * len(self._slots)
        self._generation = 0
        self._released: list[set[MemoryTag]] = [set() for _ in self._slots]
        """The memory that each engine has given up."""

    @property
    def addresses(self) -> EngineAddresses:
        return EngineAddresses(
            urls=tuple(self._urls),
            gpus_per_engine=self._config.cluster.rollout_num_gpus_per_engine,
            generation=self._generation,
        )

    async def start(self) -> EngineAddresses:
        await gather(*(self._start(index) for index in range(len(self._slots))))
        return self.addresses

    async def find_dead(self) -> list[int]:
        """Positions of engines whose process has ended (the holder or the server)."""
        alive = await asyncio.gather(
            *(holder.alive.remote() for holder in self._holders), return_exceptions=True
        )
        return [index for index, answer in enumerate(alive) if answer is not True]

    async def find_dead_soon(self) -> list[int]:
        """``find_dead`` after a failure: a connection breaks a moment before the process behind it
        is seen to have ended."""
        deadline = time.monotonic() + DEATH_NOTICE_S
        dead = await self.find_dead()
        while not dead and time.monotonic() < deadline:
            await asyncio.sleep(DEATH_NOTICE_S / 30)
            dead = await self.find_dead()
        return dead

    async def find_unhealthy(self, timeout_s: float) -> list[int]:
        """Positions of engines that do not answer a health probe in time."""
        return await self._find_silent(EngineClient.health, timeout_s)

    async def find_hung(self, timeout_s: float) -> list[int]:
        """Positions of engines that do not say in time what they are. SGLang's health probe
        generates, which an engine that a weight update has paused does not."""
        return await self._find_silent(EngineClient.server_info, timeout_s)

    async def _find_silent(
        self, ask: Callable[[EngineClient], Awaitable[object]], timeout_s: float
    ) -> list[int]:
        async def answers(url: str) -> bool:
            client = EngineClient(url, timeout_s=timeout_s)
            try:
                await ask(client)
            except EngineError:
                return False
            finally:
                await client.close()
            return True

        found = await asyncio.gather(*(answers(url) for url in self._urls))
        return [index for index, answered in enumerate(found) if not answered]

    async def restart(self, index: int) -> None:
        """Replace an engine. It comes up with the checkpoint's weights: sync before using it.

        It gives up the memory that the old one had given up.
        """
        with contextlib.suppress(RayError):
            logger.warning(
                "engine %d ended; its last lines:\n%s",
                index,
                await self._holders[index].last_lines.remote(),
            )
            await self._holders[index].stop.remote()
        kill(self._holders[index])
        self._holders[index] = self._new_holder(index)
        released = self._released[index]
        self._released[index] = set()
        await self._start(index)
        self._generation += 1
        await self._release(index, released)

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that holds it; one that has ended holds none."""
        await self._each(lambda index: self._release(index, set(tags)))

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that has given it up."""
        await self._each(lambda index: self._resume(index, set(tags)))

    def log_file(self, index: int) -> Path:
        return self._log_dir / f"engine_{index}.log"

    async def pids(self) -> list[int | None]:
        return list(await asyncio.gather(*(holder.pid.remote() for holder in self._holders)))

    async def stop(self) -> None:
        """End every server; a holder that is gone, or fails, does not keep the others from it."""
        stops = (holder.stop.remote() for holder in self._holders)
        await asyncio.gather(*stops, return_exceptions=True)

    def kill(self) -> None:
        for holder in self._holders:
            kill(holder)

    def _new_holder(self, index: int) -> Any:
        options = self._placement.actor_options(self._slots[index][0], SHARE_OF_A_SLOT)
        # With threads of its own, so that `stop` need not wait until `start` is done.
        return (
            ray.remote(EngineHolder)
            .options(max_concurrency=2, **options)
            .remote("the engine server")
        )

    async def _start(self, index: int) -> None:
        launch = self._launch(self._config, index, self.log_file(index))
        self._urls[index] = await call(
            f"engine {index}", self._holders[index].start.remote(launch), during="start"
        )

    async def _each(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """For every engine; one that fails does not keep the others from it."""
        results = await asyncio.gather(*map(work, range(len(self._slots))), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def _release(self, index: int, tags: set[MemoryTag]) -> None:
        missing = tags - self._released[index]
        if not missing:
            return
        try:
            async with self._client(index) as client:
                await client.release_memory(sorted(missing))
        except JobError:
            if index not in await self.find_dead_soon():
                raise
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
        client = EngineClient(self._urls[index], timeout_s=timeout_s)
        try:
            yield client
        except EngineError as error:
            raise JobError(f"engine {index} failed to give up or take memory: {error}") from error
        finally:
            await client.close()
