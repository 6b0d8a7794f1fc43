"""Engine processes behind their holders, on a real cluster."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles.config.root import MilesConfig
from miles.ray.placement import plan_layout, reserve
from miles.ray.rollout import engine_launch
from miles.ray.rollout.engine_factory import EngineGroup
from miles.ray.rollout.engine_launch import EngineLaunch
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


def test_a_new_engine_holds_no_more_memory_than_the_one_it_replaces(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = one_engine(tiny_qwen3)
    layout = plan_layout(config, with_engines=True, with_trainer=False)
    tags = ["kv_cache", "weights"]

    async def run() -> tuple[list[int], int]:
        placement = await reserve(layout, 60)
        engines = EngineGroup(config, layout, placement, tmp_path)
        try:
            await engines.start()
            await engines.release_memory(tags)
            (pid,) = await engines.pids()
            assert pid is not None
            psutil.Process(pid).kill()
            while not await engines.find_dead():
                await asyncio.sleep(0.05)
            await engines.restart(0)
            answers = [await is_released(engines)]
            await engines.resume_memory(tags)
            answers.append(await is_released(engines))
            return answers, engines.addresses.generation
        finally:
            await engines.stop()
            engines.kill()
            placement.remove()

    answers, generation = asyncio.run(asyncio.wait_for(run(), 120))
    assert answers == [True, False]
    assert generation == 1


async def is_released(engines: EngineGroup) -> bool:
    client = EngineClient(engines.addresses.urls[0], timeout_s=30)
    try:
        return (await client.server_info())["released"]
    finally:
        await client.close()
