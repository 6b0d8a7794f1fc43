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
from miles.ray.rollout import engine_factory
from miles.ray.rollout.engine_factory import EngineGroup, EngineLaunch


def never_ready(config: MilesConfig, log_file: Path) -> EngineLaunch:
    """A server that loads for longer than anybody waits."""
    command = (sys.executable, "-c", "import time; time.sleep(120)")
    return EngineLaunch(command=command, environment={}, log_file=str(log_file))


def test_engines_that_still_load_are_stopped_at_once(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_factory,
        "LAUNCHERS",
        engine_factory.Registry("engine", {"embedded": f"{__name__}:never_ready"}),
    )
    config = MilesConfig()
    config = replace(config, cluster=replace(config.cluster, rollout_num_gpus=1))
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
