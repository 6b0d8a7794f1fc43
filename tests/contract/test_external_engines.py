"""Engines launched elsewhere, as the driver handles them: real servers, which it does not own."""

import asyncio
import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from miles.config.root import MilesConfig
from miles.core.ports import hold_port
from miles.ray.errors import JobError
from miles.ray.rollout.external_check import SAME_IN_EVERY_JOB, differences
from miles.ray.rollout.external_engines import ExternalEngines
from tests.engine_process import EngineProcess, get, launch, post

Servers = list[EngineProcess]


def start(model: Path, folder: Path, port: int, *options: str) -> EngineProcess:
    return launch(model, folder, "--port", str(port), *options)


@contextmanager
def two_servers(model: Path, folder: Path) -> Generator[Servers]:
    with ExitStack() as stack:
        # Held: a server that is started anew finds the port that it had.
        held = [stack.enter_context(hold_port()) for _ in range(2)]
        ports = [each.getsockname()[1] for each in held]
        started = [start(model, folder / str(port), port) for port in ports]
        for server in started:
            stack.callback(server.stop)
        yield [server.wait_ready() for server in started]


@pytest.fixture
def mortals(tiny_qwen3: Path, tmp_path: Path) -> Iterator[Servers]:
    """Two that a test may end."""
    with two_servers(tiny_qwen3, tmp_path) as servers:
        yield servers


@pytest.fixture(scope="module")
def servers(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with two_servers(tiny_qwen3, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


def job(model: Path, *urls: str, per_engine: int = 1, timeout_s: float = 60.0) -> MilesConfig:
    config = MilesConfig()
    rollout = replace(
        config.rollout,
        hf_checkpoint=str(model),
        rollout_engine="embedded",
        rollout_external=True,
        rollout_external_engine_addrs=tuple(url.removeprefix("http://") for url in urls),
    )
    cluster = replace(
        config.cluster,
        rollout_num_gpus=len(urls) * per_engine,
        rollout_num_gpus_per_engine=per_engine,
        placement_timeout_s=timeout_s,
    )
    return replace(config, rollout=rollout, cluster=cluster)


def set_version(url: str, version: int) -> None:
    body = {"new_version": str(version), "abort_all_requests": False}
    assert post(url, "/update_weight_version", body).status == 200, body


def test_one_that_ends_is_left_out_until_it_answers_again(
    mortals: Servers, tiny_qwen3: Path, tmp_path: Path
) -> None:
    urls = [server.url for server in mortals]
    engines = ExternalEngines(job(tiny_qwen3, *urls))

    async def lose_the_second() -> None:
        await engines.start()
        assert engines.addresses.urls == tuple(urls)
        assert engines.newcomers.newcomers == (0, 1)
        engines.weights_given()
        assert engines.newcomers.urls == ()
        assert await engines.find_dead() == []
        assert await engines.find_unhealthy(30) == []
        mortals[1].process.kill()
        mortals[1].process.wait()
        assert await engines.find_dead() == [1]
        assert await engines.find_unhealthy(30) == [1]
        # Nothing new that has not the trainer's weights.
        assert not await engines.replace([1])
        assert engines.addresses.urls == (urls[0],)
        assert engines.addresses.generation == 1
        assert await engines.find_dead() == []
        assert not await engines.readmit()

    async def find_it_again() -> None:
        assert await engines.readmit()
        assert engines.addresses.urls == tuple(urls)
        assert engines.addresses.generation == 2
        assert (engines.newcomers.urls, engines.newcomers.newcomers) == ((urls[1],), (1,))
        assert not await engines.readmit()

    asyncio.run(lose_the_second())
    again = start(tiny_qwen3, tmp_path / "again", int(urls[1].rpartition(":")[2]))
    try:
        again.wait_ready()
        asyncio.run(find_it_again())
    finally:
        again.stop()


def test_one_that_was_started_anew_between_two_looks_has_not_the_weights_any_more(
    mortals: Servers, tiny_qwen3: Path, tmp_path: Path
) -> None:
    urls = [server.url for server in mortals]
    engines = ExternalEngines(job(tiny_qwen3, *urls))
    for url in urls:
        set_version(url, 3)
    asyncio.run(engines.start())
    assert asyncio.run(engines.find_dead()) == []
    mortals[0].process.kill()
    mortals[0].process.wait()
    again = start(tiny_qwen3, tmp_path / "again", int(urls[0].rpartition(":")[2]))
    try:
        again.wait_ready()
        assert asyncio.run(engines.find_dead()) == [0]
    finally:
        again.stop()


def test_without_any_engine_left_the_job_stops_and_says_what_to_do(
    servers: Servers, tiny_qwen3: Path
) -> None:
    engines = ExternalEngines(job(tiny_qwen3, servers[0].url))
    asyncio.run(engines.start())
    with pytest.raises(JobError, match=r"none of the engines .* start them again"):
        asyncio.run(engines.replace([0]))


def test_all_differences_of_all_engines_are_told_at_once(
    servers: Servers, tiny_qwen3: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_qwen3, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    urls = [server.url for server in servers]
    wanted = job(other, *urls, per_engine=2)
    wanted = replace(wanted, precision=replace(wanted.precision, fp16=True))
    wanted = replace(wanted, rollout=replace(wanted.rollout, sglang_context_length=17))
    with pytest.raises(JobError) as caught:
        asyncio.run(ExternalEngines(wanted).start())
    lines = str(caught.value).splitlines()
    for url in urls:
        own = [line for line in lines if line.startswith(f"  {url}: ")]
        assert [line.split(": ")[1].split(" is ")[0] for line in own] == [
            "model_path",
            "tp_size",
            "dtype",
            "context_length",
        ]
    assert f"another model than '{other}'" in lines[1]
    assert "dtype is 'float32' and must be 'float16' (--fp16)" in lines[3]
    assert all(get(url, "/health").status == 200 for url in urls)


def test_a_copy_of_the_model_is_the_same_model(
    servers: Servers, tiny_qwen3: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_qwen3, tmp_path / "copy"))
    asyncio.run(ExternalEngines(job(copy, servers[0].url)).start())


def test_an_address_where_nobody_answers_is_named_in_time(tiny_qwen3: Path) -> None:
    with hold_port() as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(JobError, match=rf"did not answer within 1 s .*\n  {url}/server_info"):
            asyncio.run(ExternalEngines(job(tiny_qwen3, url, timeout_s=1.0)).start())


def test_one_that_an_earlier_job_left_paused_goes_on(servers: Servers, tiny_qwen3: Path) -> None:
    url = servers[0].url
    assert post(url, "/pause_generation", {"mode": "retract"}).status == 200
    assert get(url, "/server_info").json["paused"]
    asyncio.run(ExternalEngines(job(tiny_qwen3, url)).start())
    assert not get(url, "/server_info").json["paused"]


def test_stopping_leaves_it_alive(servers: Servers, tiny_qwen3: Path) -> None:
    engines = ExternalEngines(job(tiny_qwen3, servers[0].url))

    async def use() -> None:
        await engines.start()
        await engines.stop()
        engines.kill()

    asyncio.run(use())
    assert get(servers[0].url, "/health_generate").status == 200


@pytest.mark.sglang
def test_sglang_as_a_job_launches_it_has_no_differences(
    sglang_url: str, engine_model: Path
) -> None:
    config = job(engine_model, sglang_url)
    config = replace(config, rollout=replace(config.rollout, rollout_engine="sglang"))
    info = get(sglang_url, "/server_info").json
    assert differences(config, info) == []
    assert set(SAME_IN_EVERY_JOB) <= set(info)
    asyncio.run(ExternalEngines(config).start())
    wider = replace(config, cluster=replace(config.cluster, rollout_num_gpus_per_engine=4))
    (found,) = differences(wider, info)
    assert found == "tp_size is 1 and must be 4 (--rollout-num-gpus-per-engine)"
    (found,) = differences(config, {**info, "dp_size": 2})
    assert found.startswith("dp_size is 2 and must be 1")
    (found,) = differences(job(engine_model, sglang_url), info)
    assert found == "engine is 'sglang' and must be 'embedded' (--rollout-engine)"
