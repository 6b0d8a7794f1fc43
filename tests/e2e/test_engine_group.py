"""Engine processes behind their holders, on a real cluster."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles.config.root import MilesConfig
from miles.ray.errors import JobError
from miles.ray.placement import plan_layout, reserve
from miles.ray.rollout import engine_launch, supervision
from miles.ray.rollout.engine_factory import EngineGroup
from miles.ray.rollout.engine_launch import EngineLaunch
from miles.ray.rollout.supervision import EngineSupervisor
from miles.rollout.engine_client import EngineClient


def never_ready(config: MilesConfig, index: int, log_file: Path) -> EngineLaunch:
    """A server that loads for longer than anybody waits."""
    command = (sys.executable, "-c", "import time; time.sleep(120)")
    return EngineLaunch(command=command, environment={}, log_file=str(log_file))


def one_engine(model: Path | None = None) -> MilesConfig:
    config = MilesConfig()
    rollout = replace(config.rollout, hf_checkpoint=None if model is None else str(model))
    return replace(config, cluster=replace(config.cluster, rollout_num_gpus=1), rollout=rollout)


def test_engines_that_still_load_are_stopped_at_once(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine_launch.LAUNCHERS, "embedded", never_ready)
    config = one_engine()
    layout = plan_layout(config, with_engines=True, with_trainer=False)

    async def run() -> tuple[int, float]:
        placement = await reserve(layout, 60)
        engines = EngineGroup(config, layout, placement, tmp_path)
        starting = asyncio.ensure_future(engines.start())
        try:
            deadline = time.monotonic() + 60
            pid = None
            while pid is None:
                assert time.monotonic() < deadline
                (pid,) = await asyncio.wait_for(engines.pids(), 60)
            start = time.monotonic()
            await asyncio.wait_for(engines.stop(), 20)
            return pid, time.monotonic() - start
        finally:
            starting.cancel()
            engines.kill()
            placement.remove()

    pid, seconds = asyncio.run(run())
    assert seconds < 10
    assert not psutil.pid_exists(pid)


@asynccontextmanager
async def started(model: Path, log_dir: Path) -> AsyncIterator[EngineGroup]:
    """A group of one embedded engine."""
    config = one_engine(model)
    layout = plan_layout(config, with_engines=True, with_trainer=False)
    placement = await reserve(layout, 60)
    engines = EngineGroup(config, layout, placement, log_dir)
    try:
        await engines.start()
        yield engines
    finally:
        await engines.stop()
        engines.kill()
        placement.remove()


async def kill_the_server(engines: EngineGroup) -> None:
    (pid,) = await engines.pids()
    assert pid is not None
    psutil.Process(pid).kill()


def test_a_new_engine_holds_no_more_memory_than_the_one_it_replaces(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    tags = ["kv_cache", "weights"]

    async def run() -> tuple[list[int], int]:
        async with started(tiny_qwen3, tmp_path) as engines:
            await engines.release_memory(tags)
            await kill_the_server(engines)
            while not await engines.find_dead():
                await asyncio.sleep(0.05)
            await engines.restart(0)
            answers = [await is_released(engines)]
            await engines.resume_memory(tags)
            answers.append(await is_released(engines))
            return answers, engines.addresses.generation

    answers, generation = asyncio.run(asyncio.wait_for(run(), 120))
    assert answers == [True, False]
    assert generation == 1


def test_an_engine_that_ends_under_a_weight_update_is_replaced_and_updated_anew(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "END_S", 1.0)

    async def run() -> None:
        async with started(tiny_qwen3, tmp_path) as engines:
            supervisor = EngineSupervisor(engines, None, MilesConfig().rollout, heal=never)
            asked: list[str] = []

            async def push() -> None:
                asked.append(engines.addresses.urls[0])
                if len(asked) == 1:
                    await kill_the_server(engines)
                await engines.release_memory(["kv_cache"])

            async def refused_push() -> None:
                await engines.release_memory(["no such memory"])

            assert await supervisor.sync(push)
            assert asked == [asked[0], engines.addresses.urls[0]]
            assert engines.addresses.generation == 1
            assert not await supervisor.sync(push)
            with pytest.raises(JobError, match="no such memory"):
                await supervisor.sync(refused_push)
            assert engines.addresses.generation == 1

    asyncio.run(asyncio.wait_for(run(), 120))


async def never() -> None:
    raise AssertionError("nothing watches here")


async def is_released(engines: EngineGroup) -> bool:
    client = EngineClient(engines.addresses.urls[0], timeout_s=30)
    try:
        return (await client.server_info())["released"]
    finally:
        await client.close()
