"""The pool over real embedded engines, which this process runs in threads."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from miles.backends.embedded.api import make_app
from miles.backends.embedded.engine import Engine, EngineSettings
from miles.backends.embedded.server import Server, bind
from miles.contracts.engine import Completion, EngineError, GenerateRequest, SamplingParams
from miles.core.ports import hold_port
from miles.rollout import pool as pool_module
from miles.rollout.engine_client import EngineUnreachable, http_url
from miles.rollout.pool import EnginePool
from tests.engine_process import get, post, running_requests


@dataclass
class LocalEngine:
    """An engine server in a thread."""

    settings: EngineSettings
    port: int = 0
    url: str = field(init=False)

    def __post_init__(self) -> None:
        listener = bind("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self.url = http_url("127.0.0.1", self.port)
        self._server = Server(
            uvicorn.Config(
                app=None,  # pyright: ignore[reportArgumentType]
                log_level="error",
                timeout_graceful_shutdown=1,
            )
        )
        self._server.config.app = make_app(self._server.holder)
        self._server.holder.engine = self.engine = Engine(self.settings)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Requests in flight lose their connection."""
        self._server.end()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def make_engine(tiny_qwen3: Path) -> Iterator[Callable[..., LocalEngine]]:
    engines: list[LocalEngine] = []

    def make(port: int = 0, **settings: Any) -> LocalEngine:
        settings = {"max_running_requests": 16, "max_total_tokens": 50_000, **settings}
        engines.append(LocalEngine(EngineSettings(model_path=str(tiny_qwen3), **settings), port))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@asynccontextmanager
async def opened(*urls: str, **options: Any) -> AsyncIterator[EnginePool]:
    options = {"concurrency": 8, "timeout_s": 60, "patience_s": 60, **options}
    pool = EnginePool(urls, **options)
    try:
        yield pool
    finally:
        await pool.close()


def request(count: int = 4, position: int | None = None, of: int = 0, **given: Any) -> Any:
    params = SamplingParams(temperature=1.0, max_new_tokens=count, ignore_eos=True, **given)
    admission = None if position is None else ("key", position, of)
    return GenerateRequest(input_ids=[5, 6, 7], params=params, admission=admission)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 200))


@pytest.mark.parametrize("bad", [-1, 64])
def test_a_token_id_that_the_model_does_not_have_is_sent_to_no_engine(bad: int) -> None:
    async def main() -> None:
        # At an engine that is not there it would wait and then be sent again.
        async with opened("http://127.0.0.1:9", vocabulary_size=64) as pool:
            with pytest.raises(EngineError, match=f"^{bad} is not a token id .*0 to 63"):
                await pool.generate(replace(request(), input_ids=[0, 63, bad]))
            assert pool.stats().requests == 0

    run(main)


def test_requests_go_to_the_engine_with_the_fewest_in_flight(
    make_engine: Callable[..., LocalEngine],
) -> None:
    first, second = make_engine(), make_engine()

    async def main() -> None:
        async with opened(first.url, second.url) as pool:
            for engine in (first, second):
                await asyncio.to_thread(post, engine.url, "/pause_generation")
            tasks = [asyncio.create_task(pool.generate(request())) for _ in range(6)]
            for engine in (first, second):
                await until(lambda e=engine: waiting(e) == 3)
                await asyncio.to_thread(post, engine.url, "/continue_generation")
            results = await asyncio.gather(*tasks)
            assert [len(result[0].output_ids) for result in results] == [4] * 6
            stats = pool.stats()
            assert (stats.requests, stats.retries, stats.in_flight) == (6, 0, 0)

    run(main)


def waiting(engine: LocalEngine) -> int:
    return get(engine.url, "/v1/loads").json["loads"][0]["num_waiting_reqs"]


def test_no_engine_gets_more_than_the_concurrency(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def main() -> None:
        async with opened(engine.url, concurrency=2) as pool:
            await asyncio.to_thread(post, engine.url, "/pause_generation")
            tasks = [asyncio.create_task(pool.generate(request())) for _ in range(7)]
            await until(lambda: waiting(engine) == 2)
            await asyncio.sleep(0.2)
            assert waiting(engine) == 2
            assert pool.stats().in_flight == 2
            await asyncio.to_thread(post, engine.url, "/continue_generation")
            assert len(await asyncio.gather(*tasks)) == 7

    run(main)


def test_a_request_whose_engine_dies_is_answered_by_another(
    make_engine: Callable[..., LocalEngine],
) -> None:
    dying, living = make_engine(), make_engine()

    async def main() -> None:
        async with opened(dying.url, living.url) as pool:
            await asyncio.to_thread(post, dying.url, "/pause_generation")
            tasks = [asyncio.create_task(pool.generate(request())) for _ in range(4)]
            await until(lambda: waiting(dying) == 2)
            await asyncio.to_thread(dying.stop)
            results = await asyncio.gather(*tasks)
            assert [r[0].finish_reason for r in results] == ["length"] * 4
            assert pool.stats() == type(pool.stats())(requests=4, retries=2, in_flight=0)
            # The dead engine is not asked again.
            await asyncio.gather(*(pool.generate(request()) for _ in range(6)))
            assert pool.stats().retries == 2

    run(main)


def test_requests_wait_while_no_engine_is_alive_and_go_on_when_one_comes(
    make_engine: Callable[..., LocalEngine],
) -> None:
    first = make_engine()

    async def main() -> None:
        async with opened(first.url) as pool:
            await asyncio.to_thread(first.stop)
            tasks = [asyncio.create_task(pool.generate(request())) for _ in range(3)]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks)
            second = await asyncio.to_thread(make_engine)
            pool.add(second.url)
            assert len(await asyncio.gather(*tasks)) == 3

    run(main)


def test_an_engine_that_comes_back_under_its_old_url_is_found_again(
    make_engine: Callable[..., LocalEngine],
) -> None:
    with hold_port() as held:
        engine = make_engine(held.getsockname()[1])

        async def main() -> None:
            async with opened(engine.url) as pool:
                await asyncio.to_thread(engine.stop)
                task = asyncio.create_task(pool.generate(request()))
                await asyncio.sleep(0.3)
                await asyncio.to_thread(make_engine, engine.port)
                assert len((await task)[0].output_ids) == 4

        run(main)


def test_waiting_for_an_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PROBE_INTERVAL_S", 0.05)

    async def main() -> None:
        async with opened("http://127.0.0.1:9", patience_s=0.4) as pool:
            start = time.monotonic()
            with pytest.raises(EngineError, match=r"no engine was alive for 0.4 s"):
                await pool.generate(request())
            assert time.monotonic() - start < 60
            assert pool.stats().in_flight == 0

    run(main)


def test_a_request_under_which_every_engine_dies_is_given_up() -> None:
    """A server that is healthy but drops every generate request."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        line = await reader.readline()
        if b"/health" in line:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            asked += 1
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, opened(f"http://127.0.0.1:{port}") as pool:
            with pytest.raises(EngineUnreachable):
                await pool.generate(request())
            assert pool.stats().retries == pool_module.MAX_ATTEMPTS - 1
        assert asked == pool_module.MAX_ATTEMPTS

    run(main)


def test_what_an_engine_refuses_is_not_sent_again(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def main() -> None:
        async with opened(engine.url) as pool:
            with pytest.raises(EngineError, match="exceed the context length"):
                await pool.generate(request(count=5000))
            assert pool.stats().retries == 0

    run(main)


def test_an_engine_removed_and_added_again_finishes_what_it_had(
    make_engine: Callable[..., LocalEngine],
) -> None:
    engine = make_engine()

    async def main() -> None:
        async with opened(engine.url) as pool:
            await asyncio.to_thread(post, engine.url, "/pause_generation")
            old = asyncio.create_task(pool.generate(request()))
            await until(lambda: waiting(engine) == 1)
            pool.remove(engine.url)
            assert pool.urls == ()
            pool.remove(engine.url)
            pool.add(engine.url + "/")
            new = asyncio.create_task(pool.generate(request()))
            await until(lambda: waiting(engine) == 2)
            assert pool.stats().in_flight == 2
            await asyncio.to_thread(post, engine.url, "/continue_generation")
            assert len((await old)[0].output_ids) == len((await new)[0].output_ids) == 4
            assert pool.stats().in_flight == 0
            assert all(e.in_flight == 0 for e in pool._engines)  # pyright: ignore[reportPrivateUsage]

    run(main)


def test_set_engines_keeps_adds_and_removes(make_engine: Callable[..., LocalEngine]) -> None:
    engine = make_engine()

    async def main() -> None:
        async with opened("http://127.0.0.1:9", engine.url) as pool:
            pool.set_engines([engine.url, "http://127.0.0.1:10/"])
            assert pool.urls == (engine.url, "http://127.0.0.1:10")
            pool.set_engines([engine.url])
            assert len(await pool.generate(request())) == 1

    run(main)


def test_abort_all_ends_what_runs_and_what_has_not_been_sent(
    make_engine: Callable[..., LocalEngine],
) -> None:
    engine = make_engine()

    async def main() -> None:
        async with opened(engine.url, concurrency=2) as pool:
            tasks = [asyncio.create_task(pool.generate(request(count=1500))) for _ in range(5)]
            await until(lambda: running_requests(engine.url) == 2)
            await pool.abort_all()
            results: list[list[Completion]] = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [r[0].finish_reason for r in results] == ["abort"] * 5
            lengths = sorted(len(r[0].output_ids) for r in results)
            assert lengths[:3] == [0, 0, 0]
            assert all(0 < n < 1500 for n in lengths[3:])
            assert (await pool.generate(request()))[0].finish_reason == "length"

    run(main)


def test_admission_deals_requests_out_by_position_and_completes_on_every_engine(
    make_engine: Callable[..., LocalEngine],
) -> None:
    """Seven requests over two engines of one place each: four and three, no deadlock, and the same
    tokens whatever the order of submission."""
    first, second = make_engine(), make_engine()
    results: list[list[Any]] = []

    async def main() -> None:
        async with opened(first.url, second.url, concurrency=1) as pool:
            for order in (range(7), reversed(range(7))):
                for engine in (first, second):
                    await asyncio.to_thread(post, engine.url, "/pause_generation")
                tasks = {
                    position: asyncio.create_task(
                        pool.generate(request(8, position, 7, sampling_seeds=(position,)))
                    )
                    for position in order
                }
                await until(lambda: (waiting(first), waiting(second)) == (4, 3))
                for engine in (first, second):
                    await asyncio.to_thread(post, engine.url, "/continue_generation")
                await asyncio.gather(*tasks.values())
                results.append([tasks[i].result() for i in range(7)])

    run(main)
    assert results[0] == results[1]


def test_an_admitted_request_whose_engine_dies_is_still_answered(
    make_engine: Callable[..., LocalEngine],
) -> None:
    dying, living = make_engine(), make_engine()

    async def main() -> None:
        async with opened(dying.url, living.url) as pool:
            tasks = [asyncio.create_task(pool.generate(request(4, i, 5))) for i in range(4)]
            await until(lambda: waiting(dying) == 2)
            await asyncio.to_thread(dying.stop)
            results = await asyncio.gather(*tasks)
            assert [r[0].finish_reason for r in results] == ["length"] * 4

    run(main)
