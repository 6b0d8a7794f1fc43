"""Engines that were launched elsewhere: checked and given weights, never started or stopped."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager

from miles.config.root import MilesConfig
from miles.config.values import split_address
from miles.contracts.engine import EngineError, MemoryTag
from miles.core import logging
from miles.ray.errors import JobError
from miles.ray.rollout.engines import find_silent, only
from miles.ray.rollout.external_check import differences
from miles.rollout.engine_client import EngineClient, http_url
from miles.rollout.engine_set import EngineAddresses

logger = logging.get(__name__)

POLL_S = 1.0
CALL_TIMEOUT_S = 30.0
RETURN_TIMEOUT_S = 5.0
"""Of a look at one that is left out: the job goes on meanwhile, but nobody looks after the rest."""
STOP_TIMEOUT_S = 5.0

FLAG = "--rollout-external-engine-addrs"


class ExternalEngines:
    """Implements ``engines.Engines``. One that ends or hangs is left out until it answers again."""

    def __init__(self, config: MilesConfig) -> None:
        self._config = config
        addresses = map(split_address, config.rollout.rollout_external_engine_addrs)
        self._urls = [http_url(*address) for address in addresses if address is not None]
        self._absent: set[int] = set()
        self._has_version: set[int] = set()
        """Those that have reported a weight version: one that forgets it was started anew."""
        self._newcomers = set(range(len(self._urls)))
        self._generation = 0
        self._refused: dict[int, str] = {}
        """Why one that is back cannot be used, as it was said."""

    @property
    def addresses(self) -> EngineAddresses:
        return EngineAddresses(
            urls=tuple(self._urls[index] for index in self._present()),
            gpus_per_engine=self._config.cluster.rollout_num_gpus_per_engine,
            generation=self._generation,
        )

    @property
    def newcomers(self) -> EngineAddresses:
        return only(self.addresses, self._present(), self._newcomers)

    def weights_given(self) -> None:
        self._newcomers.difference_update(self._present())

    def url(self, index: int) -> str:
        return self._urls[index]

    def name(self, index: int) -> str:
        return f"engine {self._urls[index]} of {FLAG}"

    async def start(self) -> None:
        """Wait until all of them answer, and hold them against the job's flags.

        Raises ``JobError`` with everything that is wrong with any of them.
        """
        deadline = time.monotonic() + self._config.cluster.placement_timeout_s
        everywhere = range(len(self._urls))
        unready = await asyncio.gather(*(self._wait_for(i, deadline) for i in everywhere))
        _raise_any(
            f"engines of {FLAG} did not answer within "
            f"{self._config.cluster.placement_timeout_s:g} s (--placement-timeout-s)",
            unready,
        )
        found = await asyncio.gather(*(self._differences(i) for i in everywhere))
        lines = [f"{self._urls[i]}: {each}" for i in everywhere for each in found[i]]
        _raise_any(f"engines of {FLAG} are not as this job needs them", lines)
        for index in everywhere:
            await self._unpause(index)
        logger.info("engines launched elsewhere serve at %s", " ".join(self._urls))

    async def find_dead(self) -> list[int]:
        """Positions of those that do not answer any more, or were started anew."""
        present = self._present()
        answers = await asyncio.gather(*(self._keeps_its_weights(index) for index in present))
        return [index for index, answer in zip(present, answers, strict=True) if not answer]

    async def find_unhealthy(self, timeout_s: float) -> list[int]:
        return await find_silent(self._positions(), EngineClient.health, timeout_s)

    async def find_hung(self, timeout_s: float) -> list[int]:
        return await find_silent(self._positions(), EngineClient.server_info, timeout_s)

    async def replace(self, failed: Sequence[int]) -> bool:
        """Nothing takes their place. Raises ``JobError`` when none is left."""
        for index in failed:
            logger.warning(
                "engine %s ended or hangs: left out until it answers again", self._urls[index]
            )
            self._absent.add(index)
            self._has_version.discard(index)
            self._newcomers.add(index)
        self._generation += 1
        if not self._present():
            raise JobError(
                f"none of the engines of {FLAG} answers any more ({', '.join(self._urls)}); start "
                "them again, and then this run, which goes on from its last checkpoint (--load)"
            )
        return False

    async def readmit(self) -> bool:
        absent = sorted(self._absent)
        answers = await asyncio.gather(*(self._is_back(index) for index in absent))
        back = [index for index, answer in zip(absent, answers, strict=True) if answer]
        for index in back:
            logger.warning("engine %s is back", self._urls[index])
            self._absent.discard(index)
            self._generation += 1
        return bool(back)

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """They share no device, and keep theirs."""

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """They have kept it."""

    async def stop(self) -> None:
        """They stay; what they still generate for this job ends."""
        await asyncio.gather(*(self._leave(index) for index in self._present()))

    def kill(self) -> None:
        """They stay."""

    def _present(self) -> list[int]:
        return [index for index in range(len(self._urls)) if index not in self._absent]

    def _positions(self) -> dict[int, str]:
        return {index: self._urls[index] for index in self._present()}

    async def _wait_for(self, index: int, deadline: float) -> str | None:
        """Why it does not answer; ``None`` when it does."""
        said = False
        while True:
            try:
                async with self._client(index, CALL_TIMEOUT_S) as client:
                    await client.server_info()
            except EngineError as error:
                if time.monotonic() > deadline:
                    return str(error)
                if not said:
                    logger.warning("waiting for an engine that was launched elsewhere: %s", error)
                said = True
            else:
                return None
            await asyncio.sleep(POLL_S)

    async def _differences(self, index: int) -> list[str]:
        try:
            async with self._client(index, CALL_TIMEOUT_S) as client:
                return differences(self._config, await client.server_info())
        except EngineError as error:
            return [str(error)]

    async def _unpause(self, index: int) -> None:
        """An earlier job may have ended while it was paused."""
        async with self._client(index, CALL_TIMEOUT_S) as client:
            # Refused within an update that was cut short; the next one starts over.
            with contextlib.suppress(EngineError):
                await client.resume()

    async def _keeps_its_weights(self, index: int) -> bool:
        try:
            timeout_s = self._config.rollout.rollout_health_check_timeout
            async with self._client(index, timeout_s) as client:
                version = await client.weight_version()
        except EngineError:
            return False
        if version:
            self._has_version.add(index)
        return bool(version) or index not in self._has_version

    async def _is_back(self, index: int) -> bool:
        own = {index: self._urls[index]}
        if await find_silent(own, EngineClient.health, RETURN_TIMEOUT_S):
            return False
        found = "; ".join(await self._differences(index))
        if found:
            if self._refused.get(index) != found:
                logger.warning("engine %s is back but stays out: %s", self._urls[index], found)
            self._refused[index] = found
            return False
        await self._unpause(index)
        return True

    async def _leave(self, index: int) -> None:
        try:
            async with self._client(index, STOP_TIMEOUT_S) as client:
                await client.abort()
        except EngineError as error:
            logger.warning("what an engine generates could not be aborted: %s", error)

    @asynccontextmanager
    async def _client(self, index: int, timeout_s: float) -> AsyncGenerator[EngineClient]:
        client = EngineClient(self._urls[index], timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()


def _raise_any(what: str, lines: Iterable[str | None]) -> None:
    found = [f"  {line}" for line in lines if line is not None]
    if found:
        raise JobError("\n".join([f"{what}:", *found]))
