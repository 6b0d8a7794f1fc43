"""One engine of the job's own: a server process, or one on each of several machines."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from miles.core import logging
from miles.core.ports import LOOPBACK, host_and_port
from miles.ray.errors import JobError, call, call_all, kill
from miles.ray.placement import Placement
from miles.ray.rollout.engine_holder import EngineHolder, EngineLaunch
from miles.ray.rollout.engine_launch import EnginePart

logger = logging.get(__name__)

SHARE_OF_A_SLOT = 0.2
MAX_STARTS = 3
"""Ports that SGLang derives from one that it is told cannot be held; somebody may take one."""
PORT_TAKEN = re.compile(r"already in use|\bat \d+ is not available", re.IGNORECASE)
"""The system's words for it, or SGLang's."""
HOLDER_TIMEOUT_S = 60.0
"""For the holder's process, beside the time that the server has."""


Launch = Callable[[EnginePart, Path], EngineLaunch]
"""The launch of one of a job's servers, with its log file."""


class LaunchedEngine:
    """The holders of an engine's servers, one on each machine where it has slots.

    It lives while all of its servers do. ``loopback``: nobody on another machine talks to it.
    Failures are ``JobError``.
    """

    def __init__(
        self,
        index: int,
        slots: Sequence[int],
        placement: Placement,
        launch: Launch,
        log_dir: Path,
        *,
        loopback: bool,
    ) -> None:
        self._index = index
        self._placement = placement
        self._launch = launch
        self._log_dir = log_dir
        self._loopback = loopback
        self._machines = placement.by_machine(slots)
        self._holders = self._new_holders()
        self.url = ""

    @property
    def log_file(self) -> Path:
        """That of its first server."""
        return self._log_of(0)

    async def start(self) -> None:
        """Start all servers; returns when they serve, at ``url``."""
        for attempt in range(1, MAX_STARTS + 1):
            try:
                self.url = await self._start()
                return
            except JobError as error:
                if not PORT_TAKEN.search(str(error)) or attempt == MAX_STARTS:
                    raise
                logger.warning("engine %d: a port was taken meanwhile; once more", self._index)
                await self.stop()

    async def alive(self) -> bool:
        """Whether all its holders and servers are there."""
        answers = await asyncio.gather(
            *(holder.alive.remote() for holder in self._holders), return_exceptions=True
        )
        return all(answer is True for answer in answers)

    async def restart(self) -> None:
        """New servers in place of all of its own. They have the checkpoint's weights."""
        for holder, log_file in zip(self._holders, self._log_files(), strict=True):
            with contextlib.suppress(RayError):
                if not await holder.alive.remote():
                    lines = await holder.last_lines.remote()
                    logger.warning(
                        "engine %d ended; last lines of %s:\n%s", self._index, log_file, lines
                    )
        await self.stop()
        self.kill()
        self._holders = self._new_holders()
        await self.start()

    async def pids(self) -> list[int | None]:
        """Of its servers, machine by machine."""
        return list(await asyncio.gather(*(holder.pid.remote() for holder in self._holders)))

    async def stop(self) -> None:
        """End every server; a holder that is gone, or fails, does not keep the others from it."""
        stops = (holder.stop.remote() for holder in self._holders)
        await asyncio.gather(*stops, return_exceptions=True)

    def kill(self) -> None:
        for holder in self._holders:
            kill(holder)

    async def _start(self) -> str:
        head = await self._meeting_point()
        ranks = range(len(self._holders))
        launches = [self._launch(self._part(rank, head), self._log_of(rank)) for rank in ranks]
        starts: dict[str, Any] = {
            self._name(rank): self._holders[rank].start.remote(launches[rank]) for rank in ranks
        }
        timeout_s = launches[0].start_timeout_s + HOLDER_TIMEOUT_S
        try:
            urls = await asyncio.wait_for(call_all(starts, during="start"), timeout_s)
        except TimeoutError as error:
            raise JobError(
                f"engine {self._index} did not start within {timeout_s:g} s; are the machines of "
                f"its slots still there ({', '.join(address for address, _ in self._machines)})?"
            ) from error
        return urls[0]

    async def _meeting_point(self) -> str | None:
        """``host:port`` on the first machine, held there; ``None`` where all is on one machine."""
        if len(self._machines) == 1:
            return None
        address = self._machines[0][0]
        held = self._holders[0].hold_port.remote(address)
        return host_and_port(address, await call(self._name(0), held, during="start"))

    def _part(self, rank: int, head: str | None) -> EnginePart:
        address, slots = self._machines[rank]
        ids = [self._placement.slots[slot].device_id for slot in slots]
        return EnginePart(
            engine=self._index,
            host=LOOPBACK if self._loopback else address,
            device_ids=tuple(each for each in ids if each is not None),
            num_nodes=len(self._machines),
            node_rank=rank,
            head=head,
        )

    def _new_holders(self) -> list[Any]:
        # With threads of its own, so that `stop` need not wait until `start` is done.
        return [
            ray.remote(EngineHolder)
            .options(max_concurrency=2, **self._placement.actor_options(slots[0], SHARE_OF_A_SLOT))
            .remote("the engine server")
            for _, slots in self._machines
        ]

    def _name(self, rank: int) -> str:
        machine = f" on {self._machines[rank][0]}" if len(self._machines) > 1 else ""
        return f"engine {self._index}{machine}"

    def _log_files(self) -> list[Path]:
        return [self._log_of(rank) for rank in range(len(self._machines))]

    def _log_of(self, rank: int) -> Path:
        node = f"_node_{rank}" if rank else ""
        return self._log_dir / f"engine_{self._index}{node}.log"
