"""Engine processes behind their holders, on a real cluster."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError, MemoryTag
from miles.ray.errors import JobError
from miles.ray.placement import plan_layout, reserve
from miles.ray.rollout import engine_factory, engine_launch
from miles.ray.rollout.engine_factory import EngineGroup
from miles.ray.rollout.engine_holder import EngineLaunch
from miles.ray.rollout.engine_launch import EnginePart
from miles.ray.rollout.engines import find_dead_soon
from miles.ray.rollout.supervision import EngineSupervisor
from miles.rollout.engine_client import EngineClient
from tests.engine_groups import started


def never_ready(config: MilesConfig, part: EnginePart, log_file: Path) -> EngineLaunch:
    """A server that loads for longer than anybody waits."""
    arguments = ("-c", "import time; time.sleep(300)")
    return replace(launch_of(*arguments, log_file=log_file), start_timeout_s=200)


def launch_of(*arguments: str, log_file: Path) -> EngineLaunch:
    return EngineLaunch(
        arguments=arguments, environment={}, log_file=str(log_file), start_timeout_s=60
    )


SERVER = """
import json, os, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if args["--head"] in open(args["--taken"]).read():
    sys.exit("OSError: [Errno 98] Address already in use")
told = {"url": f"http://{args['--host']}:{args['--rank']}", "pid": os.getpid()}
with open(args["--ready-file"] + ".new", "w") as file:
    json.dump(told, file)
os.replace(file.name, args["--ready-file"])
time.sleep(120)
"""


def parts_of_one(taken: Path) -> Callable[[MilesConfig, EnginePart, Path], EngineLaunch]:
    """Servers of an engine of two machines that serve nothing: ``taken`` lists addresses at which
    they cannot meet, and gets the first one where they try to."""

    def launch(config: MilesConfig, part: EnginePart, log_file: Path) -> EngineLaunch:
        assert part.head is not None
        assert part.num_nodes == 2
        if not taken.exists():
            taken.write_text(part.head)
        options = {"--host": part.host, "--rank": part.node_rank, "--head": part.head}
        options["--taken"] = str(taken)
        words = [str(word) for pair in options.items() for word in pair]
        return launch_of("-c", SERVER, *words, log_file=log_file)

    return launch


def test_an_engine_of_two_machines_lives_while_both_of_its_servers_do(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine_launch.LAUNCHERS, "sglang", parts_of_one(tmp_path / "taken"))
    config = one_engine()
    cluster = replace(config.cluster, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    rollout = replace(config.rollout, rollout_engine="sglang")
    config = replace(config, cluster=cluster, rollout=rollout)
    layout = plan_layout(config, with_engines=True, with_trainer=False)

    async def run() -> None:
        placement = await reserve(layout, 60)
        machines = zip(placement.slots, ("127.0.0.2", "127.0.0.3"), strict=True)
        apart = replace(placement, slots=tuple(replace(s, node_ip=ip) for s, ip in machines))
        engines = EngineGroup(config, layout, apart, tmp_path / "logs")
        try:
            # The first port was taken, so this is the second start.
            await engines.start()
            assert engines.addresses.urls == ("http://127.0.0.2:0",)
            old = await engines.pids()
            assert await engines.find_dead() == []
            assert old[1] is not None
            psutil.Process(old[1]).kill()
            assert await find_dead_soon(engines) == [0]
            await engines.restart(0)
            assert await engines.find_dead() == []
            new = await engines.pids()
            assert len(new) == 2
            assert not set(old) & set(new)
            assert not any(psutil.pid_exists(pid) for pid in old if pid is not None)
        finally:
            await engines.stop()
            engines.kill()
            placement.remove()

    asyncio.run(asyncio.wait_for(run(), 150))
    assert "already in use" in (tmp_path / "logs/engine_0.log").read_text()
    assert (tmp_path / "logs/engine_0_node_1.log").exists()


STUB = """
import json, os, pathlib, sys, time
args = dict(zip(sys.argv[2::2], sys.argv[3::2]))
starts = pathlib.Path(sys.argv[1])
with starts.open("a") as file:
    file.write("x")
# None starts alone: the next one is there, or comes.
if PAIRS:
    while len(starts.read_text()) % 2:
        time.sleep(0.05)
elif len(starts.read_text()) == 1:
    sys.exit("RuntimeError: nccl_port at 30233 is not available in 60 seconds. Address in use")
with open(args["--ready-file"] + ".new", "w") as file:
    json.dump({"url": "http://127.0.0.1:0", "pid": os.getpid()}, file)
os.replace(file.name, args["--ready-file"])
time.sleep(120)
"""
"""An engine that serves nothing, starts in pairs or not the first time."""


def stubs(starts: Path, *, pairs: bool) -> Callable[[MilesConfig, EnginePart, Path], EngineLaunch]:
    def launch(config: MilesConfig, part: EnginePart, log_file: Path) -> EngineLaunch:
        return launch_of("-c", STUB.replace("PAIRS", str(pairs)), str(starts), log_file=log_file)

    return launch


@pytest.mark.full
def test_engines_that_fail_together_are_started_together(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    monkeypatch.setitem(engine_launch.LAUNCHERS, "embedded", stubs(starts, pairs=True))
    config = one_engine()
    config = replace(config, cluster=replace(config.cluster, rollout_num_gpus=2))

    async def run() -> None:
        async with started(config, tmp_path / "logs") as engines:
            engines.weights_given()
            assert await engines.replace([0, 1])
            assert engines.newcomers.newcomers == (0, 1)

    asyncio.run(asyncio.wait_for(run(), 90))
    assert starts.read_text() == "xxxx"


@pytest.mark.full
def test_a_port_that_is_taken_on_the_engines_own_machine_is_tried_again(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    monkeypatch.setitem(engine_launch.LAUNCHERS, "embedded", stubs(starts, pairs=False))

    async def run() -> None:
        async with started(one_engine(), tmp_path / "logs") as engines:
            assert await engines.find_dead() == []
            await without_tolerance(engines)

    asyncio.run(asyncio.wait_for(run(), 90))
    assert starts.read_text() == "xx"


async def without_tolerance(engines: EngineGroup) -> None:
    """An engine that ends then ends the work, and what is raised says why."""
    config = one_engine()
    rollout = replace(config.rollout, use_fault_tolerance=False)
    supervisor = supervisor_of(engines, replace(config, rollout=rollout))
    await kill_first(engines)
    says = r"engine 0 \(its log is .*engine_0\.log\) ended, .*--no-use-fault-tolerance"
    with pytest.raises(JobError, match=says):
        await supervisor.watch(asyncio.sleep(60))
    with pytest.raises(JobError, match=says):
        await supervisor.with_all_engines(never)


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
            await asyncio.wait_for(engines.stop(), 60)
            return pid, time.monotonic() - start
        finally:
            starting.cancel()
            engines.kill()
            placement.remove()

    pid, seconds = asyncio.run(run())
    assert seconds < 60
    assert not psutil.pid_exists(pid)


@pytest.mark.full
def test_a_new_engine_holds_no_more_memory_than_the_one_it_replaces(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = one_engine(tiny_qwen3)
    tags: list[MemoryTag] = ["kv_cache", "weights"]

    async def run() -> tuple[list[bool], int]:
        async with started(config, tmp_path) as engines:
            await engines.release_memory(["kv_cache"])
            engines.weights_given()
            await kill_first(engines)
            # One that has ended holds nothing: that it cannot be asked is no failure.
            await engines.release_memory(tags)
            await engines.restart(0)
            answers = [await is_released(engines)]
            await engines.resume_memory(tags)
            answers.append(await is_released(engines))
            assert engines.newcomers.newcomers == (0,), "it has the checkpoint's weights"
            return answers, engines.addresses.generation

    answers, generation = asyncio.run(asyncio.wait_for(run(), 120))
    assert answers == [True, False]
    assert generation == 1


def test_work_during_which_an_engine_ends_is_done_again_with_a_new_one_if_it_ends_rarely(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "MAX_RESTARTS", 1)
    config = one_engine(tiny_qwen3)
    asked: list[str] = []

    async def run() -> tuple[bool, int]:
        async with started(config, tmp_path) as engines:
            supervisor = supervisor_of(engines, config)

            async def pause() -> None:
                (url,) = engines.addresses.urls
                asked.append(url)
                if len(asked) == 1:
                    await kill_first(engines)
                client = EngineClient(url, timeout_s=30)
                try:
                    await client.pause("retract")
                except EngineError as error:
                    raise JobError(str(error)) from error
                finally:
                    await client.close()

            replaced = await supervisor.with_all_engines(pause)
            with pytest.raises(JobError, match="ended again after 1 restarts within 60 minutes"):
                await engines.replace([0])
            return replaced, engines.addresses.generation

    assert asyncio.run(asyncio.wait_for(run(), 120)) == (True, 1)
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.full
def test_work_that_fails_by_itself_is_not_repeated(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = one_engine(tiny_qwen3)
    calls: list[int] = []

    async def run() -> None:
        async with started(config, tmp_path) as engines:
            supervisor = supervisor_of(engines, config)

            async def fail() -> None:
                calls.append(1)
                raise JobError("trainer 0: out of memory")

            await supervisor.with_all_engines(fail)

    with pytest.raises(JobError, match="out of memory"):
        asyncio.run(asyncio.wait_for(run(), 120))
    assert calls == [1]


@pytest.mark.full
def test_an_engine_that_hangs_is_replaced_once_the_first_wait_of_its_probes_is_over(
    ray_address: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config, first_wait = one_engine(tiny_qwen3), 5.0
    options = replace(
        config.rollout,
        rollout_health_check_interval=0.1,
        rollout_health_check_timeout=1.0,
        rollout_health_check_first_wait=first_wait,
    )
    healed = asyncio.Event()

    async def heal() -> None:
        healed.set()

    async def run() -> float:
        async with started(config, tmp_path) as engines:
            supervisor = EngineSupervisor(
                engines, None, options, make_room=heal, heal=heal, connect=never
            )
            (pid,) = await engines.pids()
            psutil.Process(pid).suspend()
            await supervisor.watch(asyncio.sleep(first_wait - 1))
            assert not healed.is_set()
            begin = time.monotonic()
            await supervisor.watch(healed.wait())
            return time.monotonic() - begin

    assert asyncio.run(asyncio.wait_for(run(), 120)) >= first_wait


def supervisor_of(engines: EngineGroup, config: MilesConfig) -> EngineSupervisor:
    async def make_room() -> None:
        """No trainer holds a device here."""

    return EngineSupervisor(
        engines, None, config.rollout, make_room=make_room, heal=never, connect=never
    )


async def never() -> None:
    raise AssertionError("nobody watches")


async def kill_first(engines: EngineGroup) -> None:
    """End the only engine; its holder alone reaps it."""
    (pid,) = await engines.pids()
    assert pid is not None
    process = psutil.Process(pid)
    process.kill()
    async with asyncio.timeout(30):
        while process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def is_released(engines: EngineGroup) -> bool:
    client = EngineClient(engines.addresses.urls[0], timeout_s=30)
    try:
        return (await client.server_info())["released"]
    finally:
        await client.close()
