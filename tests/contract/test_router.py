"""A real router of SGLang's in front of embedded engines, as a job uses it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles.config.root import MilesConfig
from miles.contracts.engine import Completion, EngineError, GenerateRequest, SamplingParams
from miles.core.ports import hold_port
from miles.ray.errors import JobError
from miles.ray.rollout.router import Router
from miles.rollout.engine_client import http_url
from miles.rollout.pool import EnginePool
from miles.rollout.router_client import RouterClient
from tests.engine_process import (
    EngineProcess,
    ending,
    launch,
    launch_router,
    post,
    running_engine,
    wait_for,
)

pytestmark = pytest.mark.sglang

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with ending(launch_router(tmp_path_factory.mktemp("router"), "--policy", "round_robin")) as one:
        yield one


@pytest.fixture(scope="module")
def survivor(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """An engine that no test ends. Its weights have version 1."""
    with running_engine(engine_model, tmp_path_factory.mktemp("survivor")) as engine:
        set_version(engine.url, 1)
        yield engine


@pytest.fixture
def victim(engine_model: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine for one test. Its weights have version 2."""
    # The port is held: one that is started in its place finds it free.
    with hold_port() as held:
        port = str(held.getsockname()[1])
        engine = launch(engine_model, tmp_path / "victim", "--port", port).wait_ready()
        set_version(engine.url, 2)
        yield engine
        engine.process.kill()
        engine.process.wait()


def set_version(url: str, version: int) -> None:
    """By which a completion tells who wrote it."""
    assert post(url, "/update_weight_version", {"new_version": str(version)}).status == 200


def request(tokens: int = 4, first: int = 5) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=(first, 6, 7), params=params)


@asynccontextmanager
async def routed(
    router: EngineProcess, *urls: str
) -> AsyncIterator[tuple[EnginePool, RouterClient]]:
    """A pool over these engines behind the router, which has no others."""
    client = RouterClient(router.url, timeout_s=TIMEOUT_S)
    pool = EnginePool((), concurrency=8, timeout_s=TIMEOUT_S)
    await asyncio.gather(*(client.add(url) for url in urls))
    pool.set_engines(urls, client.url)
    try:
        yield pool, client
    finally:
        await pool.close()
        for url in await client.workers():
            await client.remove(url)


async def until(pool: EnginePool, in_flight: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while pool.stats().in_flight != in_flight:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def versions(answers: list[list[Completion]]) -> list[int]:
    return [one.weight_version for answer in answers for one in answer]


def test_requests_are_spread_over_the_engines_and_answered_as_by_them(
    router: EngineProcess, survivor: EngineProcess, victim: EngineProcess
) -> None:
    async def run() -> tuple[list[list[Completion]], list[Completion]]:
        async with routed(router, survivor.url, victim.url) as (pool, _):
            answers = await asyncio.gather(*(pool.generate(request(first=5 + i)) for i in range(8)))
            one = await pool.generate(
                GenerateRequest(input_ids=(5,), params=SamplingParams(max_new_tokens=3), n=3)
            )
            return list(answers), one

    answers, three = asyncio.run(run())
    assert sorted(versions(answers)) == [1] * 4 + [2] * 4
    assert all(len(answer[0].output_ids) == 4 for answer in answers)
    assert all(len(answer[0].log_probs) == 4 for answer in answers)
    assert len(three) == 3


def test_an_engine_is_registered_once_and_removed_once(
    router: EngineProcess, survivor: EngineProcess
) -> None:
    async def run() -> list[tuple[str, ...]]:
        client = RouterClient(router.url, timeout_s=TIMEOUT_S)
        seen: list[tuple[str, ...]] = []
        for change in (client.add, client.add, client.remove, client.remove):
            await change(survivor.url)
            seen.append(await client.workers())
        return seen

    assert asyncio.run(run()) == [(survivor.url,), (survivor.url,), (), ()]


def test_what_an_engine_refuses_is_refused_through_the_router_too(
    router: EngineProcess, survivor: EngineProcess
) -> None:
    async def run() -> None:
        async with routed(router, survivor.url) as (pool, _):
            with pytest.raises(EngineError, match="status 400"):
                await pool.generate(request(tokens=10**9))
            assert pool.stats().retries == 0

    asyncio.run(run())


def test_requests_of_a_dead_engine_are_answered_by_another_one(
    router: EngineProcess, survivor: EngineProcess, victim: EngineProcess
) -> None:
    async def run() -> list[list[Completion]]:
        async with routed(router, survivor.url, victim.url) as (pool, client):
            for url in (survivor.url, victim.url):
                post(url, "/pause_generation", {"mode": "retract"})
            work = [asyncio.ensure_future(pool.generate(request(first=5 + i))) for i in range(6)]
            await until(pool, in_flight=6)
            # The router's connections to both are made.
            await asyncio.sleep(0.5)
            victim.process.kill()
            post(survivor.url, "/continue_generation")
            await client.remove(victim.url)
            assert await client.workers() == (survivor.url,)
            answers = await asyncio.wait_for(asyncio.gather(*work), TIMEOUT_S)
            assert pool.stats().in_flight == 0
            return list(answers)

    assert versions(asyncio.run(run())) == [1] * 6


def test_requests_wait_while_no_engine_lives_and_go_to_one_that_comes_back_at_the_same_url(
    router: EngineProcess, victim: EngineProcess, engine_model: Path, tmp_path: Path
) -> None:
    url = victim.url
    port = url.rpartition(":")[2]

    async def run() -> list[list[Completion]]:
        async with routed(router, url) as (pool, client):
            post(url, "/pause_generation", {"mode": "retract"})
            work = [asyncio.ensure_future(pool.generate(request(first=5 + i))) for i in range(3)]
            await until(pool, in_flight=3)
            victim.process.kill()
            victim.process.wait()
            await client.remove(url)
            with running_engine(engine_model, tmp_path / "again", "--port", port) as engine:
                assert engine.url == url
                await asyncio.to_thread(set_version, url, 3)
                await client.add(url)
                pool.set_engines([url], client.url)
                answers = await asyncio.wait_for(asyncio.gather(*work), TIMEOUT_S)
                assert pool.stats().in_flight == 0
                return list(answers)

    assert versions(asyncio.run(run())) == [3] * 3


def test_an_abort_reaches_the_engines_behind_the_router(
    router: EngineProcess, survivor: EngineProcess
) -> None:
    async def run() -> list[list[Completion]]:
        async with routed(router, survivor.url) as (pool, _):
            work = [asyncio.ensure_future(pool.generate(request(tokens=2000))) for _ in range(3)]
            await until(pool, in_flight=3)
            while not all(one.done() for one in work):
                await pool.abort_all()
                await asyncio.sleep(0.1)
            return [one.result() for one in work]

    assert {answer[0].finish_reason for answer in asyncio.run(run())} == {"abort"}


def test_an_engine_that_cannot_be_reached_is_not_taken(router: EngineProcess) -> None:
    async def run() -> None:
        client = RouterClient(router.url, timeout_s=2)
        nobody = http_url("127.0.0.1", 9)
        with pytest.raises(EngineError, match=f"did not take the engine {nobody} within 2 s"):
            await client.add(nobody)

    asyncio.run(run())


def test_a_router_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"the router http://127\.0\.0\.1:9 does not answer"):
        asyncio.run(RouterClient(http_url("127.0.0.1", 9), timeout_s=2).workers())


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6")
def test_an_engine_at_an_ipv6_address_is_bracketed(
    router: EngineProcess, engine_model: Path, tmp_path: Path
) -> None:
    async def run(url: str) -> list[Completion]:
        async with routed(router, url) as (pool, client):
            assert await client.workers() == (url,)
            return await pool.generate(request())

    with running_engine(engine_model, tmp_path, "--host", "::1") as engine:
        assert engine.url.startswith("http://[::1]:")
        assert len(asyncio.run(run(engine.url))[0].output_ids) == 4


def test_two_routers_on_one_host_have_addresses_of_their_own(
    router: EngineProcess, tmp_path: Path
) -> None:
    with ending(launch_router(tmp_path)) as other:
        assert other.url != router.url
        assert router.process.poll() is None


@pytest.mark.full
def test_nothing_of_a_router_that_is_killed_stays(tmp_path: Path) -> None:
    router = launch_router(tmp_path).wait_ready()
    children = psutil.Process(router.process.pid).children()
    assert children
    router.process.kill()
    router.process.wait()
    for child in children:
        child.wait(20)


@pytest.mark.full
def test_a_router_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    router = launch_router(tmp_path, parent=owner.pid).wait_ready()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_for(lambda: router.process.poll() is not None, timeout_s=20)


def external(router: EngineProcess, folder: Path) -> Router:
    """The router as a job sees it to which --sglang-router-ip and --sglang-router-port name it."""
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    config = MilesConfig()
    rollout = replace(config.rollout, sglang_router_ip=host, sglang_router_port=int(port))
    return Router(replace(config, rollout=rollout), folder)


def test_a_job_takes_its_engines_out_of_an_external_router_when_it_ends(
    router: EngineProcess, survivor: EngineProcess, tmp_path: Path
) -> None:
    async def run() -> list[tuple[str, ...]]:
        client, job = RouterClient(router.url, timeout_s=TIMEOUT_S), external(router, tmp_path)
        await job.start()
        await job.require_alive()
        await job.use([survivor.url])
        seen = [await client.workers()]
        await job.stop()
        return [*seen, await client.workers()]

    assert asyncio.run(run()) == [(survivor.url,), ()]
    assert router.process.poll() is None


def test_an_external_router_with_engines_of_somebody_else_is_refused(
    router: EngineProcess, survivor: EngineProcess, tmp_path: Path
) -> None:
    async def run() -> None:
        async with routed(router, survivor.url):
            with pytest.raises(JobError, match=r"--sglang-router-ip.*weights that are not this"):
                await external(router, tmp_path).start()

    asyncio.run(run())


def test_an_external_router_that_is_not_there_is_named_with_its_flags(
    router: EngineProcess, tmp_path: Path
) -> None:
    config = MilesConfig()
    rollout = replace(config.rollout, sglang_router_ip="::1", sglang_router_port=9)
    job = Router(replace(config, rollout=rollout), tmp_path)
    with pytest.raises(JobError, match=r"--sglang-router-ip.*http://\[::1\]:9 does not answer"):
        asyncio.run(job.start())
