"""Which engines a router of SGLang's sends requests to: registered and removed by URL.

Routers offer ``/workers``; releases up to 0.2.1 ``/add_worker`` and its like. Which, is asked once.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from miles.contracts.engine import EngineError

POLL_S = 0.1


class _Worker(msgspec.Struct):
    id: str
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class _Urls(msgspec.Struct):
    urls: list[str]


class _Fault(msgspec.Struct):
    """Of SGLang's router, whose faults have a name; an engine's own have none."""

    code: str


class _FaultAnswer(msgspec.Struct):
    error: _Fault


def is_a_routers(status: int, answer: bytes) -> bool:
    """Whether it is a router that answers, for want of an engine that does."""
    if status < 500:
        return False
    try:
        msgspec.json.decode(answer, type=_FaultAnswer)
    except msgspec.DecodeError:
        return False
    return True


class RouterClient:
    """One router. Every failure is an ``EngineError`` that names it."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """``timeout_s`` bounds every call, and how long a registration may take."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._has_workers: bool | None = None

    async def workers(self) -> tuple[str, ...]:
        """URLs of the engines that it sends requests to."""
        if await self._offers_workers():
            return tuple(worker.url for worker in await self._list())
        answer = await self._call("GET", "list_workers")
        return tuple(self._decode(answer, _Urls).urls)

    async def add(self, url: str) -> None:
        """Register a healthy engine; returns when requests can go there. Known: nothing to do."""
        # What is known is not asked for again: that would be queued too, and undo a removal that
        # comes in between.
        if url in await self.workers():
            return
        if await self._offers_workers():
            await self._call("POST", "workers", json={"url": url})
            await self._until(lambda listed: url in listed, f"take the engine {url}")
        else:
            await self._call("POST", "add_worker", params={"url": url})

    async def remove(self, url: str) -> None:
        """Send nothing more there; what is in flight may finish. Unknown: nothing to do."""
        if not await self._offers_workers():
            if url in await self.workers():
                await self._call("POST", "remove_worker", params={"url": url})
            return
        for worker in await self._list():
            if worker.url == url:
                await self._call("DELETE", f"workers/{worker.id}")
        await self._until(lambda listed: url not in listed, f"let go of the engine {url}")

    async def _offers_workers(self) -> bool:
        if self._has_workers is None:
            status, answer = await self._request("GET", "workers")
            if status not in (200, 404, 405):
                raise self._error("GET", "workers", status, answer)
            self._has_workers = status == 200
        return self._has_workers

    async def _list(self) -> list[_Worker]:
        return self._decode(await self._call("GET", "workers"), _Workers).workers

    async def _until(self, holds: Callable[[Sequence[str]], bool], what: str) -> None:
        """Changes are queued; the router asks an engine what it serves before it takes it."""
        deadline = time.monotonic() + self._timeout_s
        while not holds(await self.workers()):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the router {self.url} did not {what} within {self._timeout_s:g} s; can it "
                    "reach that address?"
                )
            await asyncio.sleep(POLL_S)

    async def _call(self, method: str, path: str, **options: Any) -> bytes:
        status, answer = await self._request(method, path, **options)
        if status not in (200, 202):
            raise self._error(method, path, status, answer)
        return answer

    async def _request(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self.url}/{path}", **options) as response,
            ):
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the router {self.url} does not answer: {type(error).__name__}: {error}"
            ) from error

    def _decode[T](self, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"the router {self.url}: malformed answer ({error})") from error

    def _error(self, method: str, path: str, status: int, answer: bytes) -> EngineError:
        text = answer[:500].decode(errors="replace")
        return EngineError(f"the router {self.url}: {method} /{path}: status {status}: {text}")
