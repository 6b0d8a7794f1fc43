"""What the driver does with the engines of a job, whether it has started them or not."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from miles.contracts.engine import EngineError, MemoryTag
from miles.ray.errors import DEATH_NOTICE_S
from miles.rollout.engine_client import EngineClient
from miles.rollout.engine_set import EngineAddresses


class Engines(Protocol):
    """Every engine has a position, which it keeps. Failures are ``JobError``."""

    @property
    def addresses(self) -> EngineAddresses:
        """Of those that serve."""
        ...

    @property
    def newcomers(self) -> EngineAddresses:
        """Of those among them that have not the trainer's weights."""
        ...

    def weights_given(self) -> None:
        """All that serve have the trainer's weights now."""
        ...

    def url(self, index: int) -> str: ...
    def name(self, index: int) -> str:
        """For messages: which one, and where to read of it."""
        ...

    async def start(self) -> None:
        """Returns when all of them serve."""
        ...

    async def find_dead(self) -> list[int]:
        """Positions of engines that serve no more: their process has ended."""
        ...

    async def find_unhealthy(self, timeout_s: float) -> list[int]:
        """Positions of engines that do not answer a health probe in time."""
        ...

    async def find_hung(self, timeout_s: float) -> list[int]:
        """Positions of engines that do not say in time what they are. SGLang's health probe
        generates, which an engine that a weight update has paused does not."""
        ...

    async def replace(self, failed: Sequence[int]) -> bool:
        """Go on without these. Whether there are new ones in their place, which have not the
        trainer's weights."""
        ...

    async def readmit(self) -> bool:
        """Take back those that serve again. Whether there are any; they have not the trainer's
        weights."""
        ...

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that shares a device and holds it; one that has ended holds none."""
        ...

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Of every engine that has given it up."""
        ...

    async def stop(self) -> None: ...
    def kill(self) -> None: ...


def only(
    addresses: EngineAddresses, positions: Iterable[int], newcomers: Collection[int]
) -> EngineAddresses:
    """Those of ``addresses``, which are at these positions, that are newcomers."""
    found = [p for p in zip(positions, addresses.urls, strict=True) if p[0] in newcomers]
    return replace(
        addresses,
        urls=tuple(url for _, url in found),
        newcomers=tuple(position for position, _ in found),
    )


async def find_dead_soon(engines: Engines) -> list[int]:
    """``find_dead`` after a failure: a connection breaks a moment before the process behind it is
    seen to have ended."""
    deadline = time.monotonic() + DEATH_NOTICE_S
    dead = await engines.find_dead()
    while not dead and time.monotonic() < deadline:
        await asyncio.sleep(DEATH_NOTICE_S / 30)
        dead = await engines.find_dead()
    return dead


async def find_silent(
    urls: Mapping[int, str], ask: Callable[[EngineClient], Awaitable[object]], timeout_s: float
) -> list[int]:
    """Positions of those that do not answer in time, or answer that they cannot."""

    async def answers(url: str) -> bool:
        client = EngineClient(url, timeout_s=timeout_s)
        try:
            await ask(client)
        except EngineError:
            return False
        finally:
            await client.close()
        return True

    found = await asyncio.gather(*map(answers, urls.values()))
    return [index for index, answered in zip(urls, found, strict=True) if not answered]
