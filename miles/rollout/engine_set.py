"""All engines of a job for the blocking calls of a trainer rank: ``EngineSet`` over HTTP."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from miles.contracts.engine import (
    EngineError,
    EngineFeatures,
    PauseMode,
    WeightGroup,
    WeightRef,
)
from miles.rollout.engine_client import EngineClient

# What a caller waits beyond the client's own time-out before it takes the event loop for dead.
MARGIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class EngineAddresses:
    """What a process needs to reach the engines: travels where an event loop cannot."""

    urls: tuple[str, ...]
    gpus_per_engine: int = 1
    generation: int = 0
    newcomers: tuple[int, ...] | None = None
    """Where these are not all engines of the job but those that have not its weights yet: their
    positions among all."""
    router: str | None = None
    """Where requests go, if not to the engines themselves."""


class _LoopThread:
    """An event loop in a daemon thread, and the clients that live in it."""

    def __init__(self, urls: tuple[str, ...], timeout_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.clients = [EngineClient(url, timeout_s=timeout_s) for url in urls]
        threading.Thread(target=self._run, name="engine-set", daemon=True).start()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(self._close())
        self.loop.close()

    async def _close(self) -> None:
        pending = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for client in self.clients:
            await client.close()


class HttpEngineSet:
    """Implements ``miles.contracts.engine.EngineSet``.

    Picklable: a copy is the addresses and the time-out, and starts its own thread at its first
    call. ``timeout_s`` bounds each call to each engine.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        *,
        gpus_per_engine: int = 1,
        generation: int = 0,
        newcomers: tuple[int, ...] | None = None,
        timeout_s: float,
    ) -> None:
        self._addresses = EngineAddresses(
            urls=tuple(urls),
            gpus_per_engine=gpus_per_engine,
            generation=generation,
            newcomers=newcomers,
        )
        self._timeout_s = timeout_s
        self._thread: _LoopThread | None = None
        self._finalizer: weakref.finalize[..., HttpEngineSet] | None = None

    @classmethod
    def of(cls, addresses: EngineAddresses, *, timeout_s: float) -> "HttpEngineSet":
        return cls(
            addresses.urls,
            gpus_per_engine=addresses.gpus_per_engine,
            generation=addresses.generation,
            newcomers=addresses.newcomers,
            timeout_s=timeout_s,
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (self._addresses, self._timeout_s)

    @property
    def urls(self) -> tuple[str, ...]:
        return self._addresses.urls

    @property
    def generation(self) -> int:
        return self._addresses.generation

    @property
    def newcomers(self) -> tuple[int, ...] | None:
        return self._addresses.newcomers

    @property
    def gpus_per_engine(self) -> int:
        return self._addresses.gpus_per_engine

    def features(self) -> EngineFeatures:
        found = set(self._call(EngineClient.features))
        if len(found) != 1:
            raise EngineError(f"the engines differ from each other: {found}")
        return found.pop()

    def pause(self, mode: PauseMode) -> None:
        self._call(lambda client: client.pause(mode))

    def flush_cache(self, *, unless_busy: bool = False) -> None:
        self._call(lambda client: client.flush_cache(unless_busy=unless_busy))

    def begin_weight_update(self) -> None:
        self._call(EngineClient.begin_weight_update)

    def submit_load(
        self, ref: WeightRef, version: int, *, engine: int | None = None
    ) -> "Future[None]":
        thread = self._started()
        if engine is None:
            return thread.submit(_on_all(thread.clients, lambda c: c.load(ref, version)))
        return thread.submit(thread.clients[engine].load(ref, version))

    def end_weight_update(self, version: int) -> None:
        self._call(lambda client: client.end_weight_update(version))

    def resume(self) -> None:
        self._call(EngineClient.resume)

    def init_weight_group(self, group: WeightGroup) -> "Future[None]":
        thread = self._started()
        ranks = {c: 1 + i * self.gpus_per_engine for i, c in enumerate(thread.clients)}
        return thread.submit(
            _on_all(thread.clients, lambda client: client.init_weight_group(group, ranks[client]))
        )

    def destroy_weight_group(self, name: str) -> None:
        self._call(lambda client: client.destroy_weight_group(name))

    def weight_checksums(self) -> list[dict[str, str]]:
        return self._call(EngineClient.weight_checksums)

    def close(self) -> None:
        """Close the connections and end the thread; a later call starts anew."""
        if self._finalizer is not None:
            self._finalizer()
        self._thread, self._finalizer = None, None

    def _started(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread(self.urls, self._timeout_s)
            self._finalizer = weakref.finalize(self, self._thread.stop)
        return self._thread

    def _call[T](self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> list[T]:
        thread = self._started()
        return thread.submit(_results(thread.clients, call)).result(self._timeout_s + MARGIN_S)


async def _results[T](
    clients: list[EngineClient], call: Callable[[EngineClient], Coroutine[Any, Any, T]]
) -> list[T]:
    """Every engine's result. Waits for all of them before it raises, with every failure."""
    results = await asyncio.gather(*map(call, clients), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return [result for result in results if not isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, EngineError):
            raise error
    raise EngineError("; ".join(str(error) for error in errors)) from errors[0]


async def _on_all(
    clients: list[EngineClient], call: Callable[[EngineClient], Coroutine[Any, Any, None]]
) -> None:
    """Like ``_results``, but the first failure is raised at once: others may be waiting for the
    engine that failed."""
    await asyncio.gather(*map(call, clients))


def _rebuild(addresses: EngineAddresses, timeout_s: float) -> HttpEngineSet:
    return HttpEngineSet.of(addresses, timeout_s=timeout_s)
