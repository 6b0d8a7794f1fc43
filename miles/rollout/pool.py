"""Spreads generate requests over the engines of a job, and outlives any one of them.

Everything runs on one event loop. A URL that is removed and added again is a new engine to the
pool: requests in flight finish on the old entry, whose counters nobody else touches.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from miles.contracts.engine import Completion, EngineError, GenerateRequest
from miles.core import logging
from miles.rollout.engine_client import EngineClient, EngineUnreachable

log = logging.get(__name__)

MAX_ATTEMPTS = 4
"""How many engines may die under one request before it is given up."""
PROBE_INTERVAL_S = 1.0
_REMEMBERED_KEYS = 16


@dataclass(frozen=True)
class PoolStats:
    """Counted since the pool was made."""

    requests: int
    retries: int
    """Requests sent again because their engine died."""
    in_flight: int


@dataclass(slots=True, eq=False)
class _Engine:
    client: EngineClient
    in_flight: int = 0
    alive: bool = True
    retired: bool = False
    """Removed from the pool; closed when its last request ends."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request in the pool."""

    request: GenerateRequest
    aborted: bool = False
    waiter: "asyncio.Future[None] | None" = field(default=None)
    """Set while it waits for an engine."""


class EnginePool:
    """Implements ``contracts.hooks.Generator`` over any number of engines."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        concurrency: int,
        timeout_s: float,
        control_timeout_s: float = 60.0,
        patience_s: float = 300.0,
        vocabulary_size: int | None = None,
    ) -> None:
        """``concurrency`` bounds the requests at one engine, ``timeout_s`` one request,
        ``patience_s`` how long requests wait while no engine is alive; ids from
        ``vocabulary_size`` on are sent to none."""
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._patience_s = patience_s
        self._vocabulary_size = vocabulary_size
        self._engines: list[_Engine] = []
        self._router: EngineClient | None = None
        self._retired: set[_Engine] = set()
        self._tickets: set[_Ticket] = set()
        self._queue: deque[_Ticket] = deque()
        self._groups: dict[str, tuple[_Engine, ...]] = {}
        self._requests = 0
        self._retries = 0
        self._weight_version = 0
        self._last_probe = 0.0
        self._closing: set[asyncio.Task[None]] = set()
        for url in urls:
            self.add(url)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(engine.client.url for engine in self._engines)

    def stats(self) -> PoolStats:
        everywhere = [*self._engines, *self._retired]
        return PoolStats(self._requests, self._retries, sum(e.in_flight for e in everywhere))

    # Membership

    def add(self, url: str) -> None:
        """Use an engine. One that is there and alive stays as it is; a dead one is replaced."""
        client = self._client(url)
        for position, engine in enumerate(self._engines):
            if engine.client.url == client.url:
                if not engine.alive:
                    self._engines[position] = _Engine(client)
                    self._retire(engine)
                break
        else:
            self._engines.append(_Engine(client))
        self._wake()

    def remove(self, url: str) -> None:
        """Send nothing more to an engine. What is in flight there may finish. Unknown: ignored."""
        for engine in [e for e in self._engines if e.client.url == url.rstrip("/")]:
            self._engines.remove(engine)
            self._retire(engine)

    def set_engines(self, urls: Sequence[str], router: str | None = None) -> None:
        """Make the pool these engines, in this order.

        With a ``router`` requests go there, and it chooses among the engines; how many are sent at
        a time still follows from their number, and aborts still go to each.
        """
        if self._router is None or self._router.url != router:
            self._close_soon(self._router)
            self._router = None if router is None else self._client(router)
        wanted = [url.rstrip("/") for url in urls]
        for url in set(self.urls) - set(wanted):
            self.remove(url)
        for url in wanted:
            self.add(url)
        self._engines.sort(key=lambda engine: wanted.index(engine.client.url))

    async def close(self) -> None:
        for engine in [*self._engines, *self._retired]:
            await engine.client.close()
        if self._router is not None:
            await self._router.close()
        self._engines.clear()
        self._retired.clear()

    # Requests

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Run a request on some engine; on another one when that engine dies.

        Raises ``EngineError`` when an engine refuses it, ``MAX_ATTEMPTS`` engines died under it, or
        none was alive for ``patience_s``; and for a token id that the model does not have.
        """
        self._require_known_ids(request)
        ticket = _Ticket(request)
        self._tickets.add(ticket)
        self._requests += 1
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                engine = await self._acquire(ticket)
                if engine is None:
                    return [self._never_started() for _ in range(request.n)]
                try:
                    server = self._router or engine.client
                    completions = await server.generate(self._addressed(ticket, engine))
                    self._weight_version = completions[-1].weight_version
                    return completions
                except EngineUnreachable as error:
                    await self._find_dead(engine)
                    if attempt == MAX_ATTEMPTS:
                        raise
                    self._again(ticket, error)
                finally:
                    self._release(engine)
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._tickets.discard(ticket)

    async def abort_all(self) -> None:
        """Ask every engine to stop what it generates; what has not been sent comes back without
        tokens. A request that is just being sent may slip past: ask again while any is out."""
        for ticket in self._tickets:
            ticket.aborted = True
        self._wake()
        await asyncio.gather(*(self._abort(e) for e in [*self._engines, *self._retired]))

    def _require_known_ids(self, request: GenerateRequest) -> None:
        """SGLang does not look at ids, and ends at one that it has no embedding of."""
        ids, size = request.input_ids, self._vocabulary_size
        if size is None or not ids or (min(ids) >= 0 and max(ids) < size):
            return
        bad = next(i for i in ids if not 0 <= i < size)
        raise EngineError(
            f"{bad} is not a token id of the model (0 to {size - 1}), so no engine was asked: the "
            "tokenizer, or the function that made the prompt, is another model's"
        )

    # Choosing

    async def _acquire(self, ticket: _Ticket) -> _Engine | None:
        """Take a place at an engine; ``None`` when the request was aborted meanwhile."""
        dead_since: float | None = None
        in_turn = not self._queue
        while not ticket.aborted:
            engine = self._choose(ticket) if in_turn or ticket.request.admission else None
            in_turn = True
            if engine is not None:
                engine.in_flight += 1
                return engine
            if any(e.alive for e in self._engines):
                dead_since = None
            else:
                dead_since = dead_since or time.monotonic()
                if time.monotonic() - dead_since > self._patience_s:
                    raise EngineError(
                        f"no engine was alive for {self._patience_s:g} s (known: {self.urls})"
                    )
            await self._wait(ticket)
        return None

    async def _wait(self, ticket: _Ticket) -> None:
        ticket.waiter = asyncio.get_running_loop().create_future()
        self._queue.append(ticket)
        try:
            await asyncio.wait_for(ticket.waiter, PROBE_INTERVAL_S)
        except TimeoutError:
            now = time.monotonic()
            if (
                not any(e.alive for e in self._engines)
                and now > self._last_probe + PROBE_INTERVAL_S
            ):
                self._last_probe = now
                await asyncio.gather(*(self._probe(e) for e in self._engines))
        finally:
            ticket.waiter = None
            if ticket in self._queue:
                self._queue.remove(ticket)

    def _choose(self, ticket: _Ticket) -> _Engine | None:
        admission = ticket.request.admission
        if admission is not None:
            key, position, _ = admission
            group = self._group(key)
            engine = group[position % len(group)] if group else None
            # No bound here: no step is made before all requests of the key are at the engine.
            if engine is not None and engine.alive and not engine.retired:
                return engine
        free = [e for e in self._engines if e.alive and e.in_flight < self._concurrency]
        return min(free, key=lambda e: e.in_flight, default=None)

    def _group(self, key: str) -> tuple[_Engine, ...]:
        """The engines that share the requests of an admission key, as its first request saw them:
        all its requests must be dealt out alike."""
        if key not in self._groups and self._engines:
            self._groups[key] = tuple(self._engines)
            while len(self._groups) > _REMEMBERED_KEYS:
                del self._groups[next(iter(self._groups))]
        return self._groups.get(key, ())

    def _addressed(self, ticket: _Ticket, engine: _Engine) -> GenerateRequest:
        """The request as this engine gets it: position and count among its own requests."""
        request = ticket.request
        if request.admission is None:
            return request
        key, position, count = request.admission
        group = self._group(key)
        index = position % len(group)
        if group[index] is not engine:
            log.warning("request %s of %r lost its engine: not reproducible", position, key)
            return replace(request, admission=None)
        share = len(range(index, count, len(group)))
        return replace(request, admission=(key, position // len(group), share))

    # Ends

    def _again(self, ticket: _Ticket, error: EngineUnreachable) -> None:
        log.warning("a request is sent again: %s", error)
        self._retries += 1
        if ticket.request.admission is not None:
            # Its companions may be done: the key would never be complete again.
            log.warning("rollout %r is not reproducible", ticket.request.admission[0])
            ticket.request = replace(ticket.request, admission=None)

    async def _find_dead(self, engine: _Engine) -> None:
        """After a request that no engine answered."""
        if self._router is None:
            await self._probe(engine)
            return
        await asyncio.gather(*(self._probe(e) for e in self._engines))
        # It sends requests to a dead engine until whoever watches the engines removes it.
        await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe(self, engine: _Engine) -> None:
        try:
            await engine.client.health(min(10.0, self._control_timeout_s))
        except EngineError as error:
            if engine.alive:
                log.warning("engine %s is taken out: %s", engine.client.url, error)
            engine.alive = False
        else:
            engine.alive = True

    async def _abort(self, engine: _Engine) -> None:
        try:
            await engine.client.abort()
        except EngineUnreachable:
            await self._probe(engine)

    def _release(self, engine: _Engine) -> None:
        engine.in_flight -= 1
        if engine.retired:
            self._retire(engine)
        self._wake()

    def _retire(self, engine: _Engine) -> None:
        engine.retired = True
        if engine.in_flight:
            self._retired.add(engine)
            return
        self._retired.discard(engine)
        self._close_soon(engine.client)

    def _client(self, url: str) -> EngineClient:
        return EngineClient(
            url, timeout_s=self._timeout_s, control_timeout_s=self._control_timeout_s
        )

    def _close_soon(self, client: EngineClient | None) -> None:
        if client is None:
            return
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _wake(self) -> None:
        """Let the requests look again that can start now, in order of arrival."""
        places = sum(max(0, self._concurrency - e.in_flight) for e in self._engines if e.alive)
        for ticket in list(self._queue):
            if ticket.aborted or places > 0:
                places -= not ticket.aborted
                self._queue.remove(ticket)
                if ticket.waiter is not None and not ticket.waiter.done():
                    ticket.waiter.set_result(None)

    def _never_started(self) -> Completion:
        return Completion(
            output_ids=(),
            log_probs=(),
            text="",
            finish_reason="abort",
            weight_version=self._weight_version,
        )
