"""Which engine a job starts and where, and the command line of each of its processes."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from ray.util.placement_group import PlacementGroup

from miles.config.root import MilesConfig
from miles.core import device_environment
from miles.ray.errors import JobError
from miles.ray.placement import Layout, Placement, Slot
from miles.ray.rollout.engine_launch import (
    LAUNCHERS,
    EnginePart,
    choose_launcher,
    embedded_launch,
    require_one_process,
    require_shared_memory,
    serves_on_loopback,
    sglang_launch,
)

ROOT = Path(__file__).resolve().parents[3]
HERE, THERE = "10.0.0.1", "10.0.0.2"


def placed(*nodes: str, on_gpu: bool = False) -> Placement:
    slots = tuple(Slot(bundle=i, node_ip=ip, device_id=None) for i, ip in enumerate(nodes))
    return Placement(group=PlacementGroup.empty(), slots=slots, on_gpu=on_gpu)


def one_engine(num_slots: int) -> Layout:
    slots = tuple(range(num_slots))
    return Layout(num_slots=num_slots, train_slots=(), engine_slots=(slots,))


def with_rollout(config: MilesConfig, **rollout: object) -> MilesConfig:
    return replace(config, rollout=replace(config.rollout, **rollout))  # pyright: ignore[reportArgumentType]


def options(arguments: tuple[str, ...]) -> dict[str, str]:
    return {a: b for a, b in pairwise(arguments) if a.startswith("--")}


def test_the_default_engine_is_one_that_can_be_started() -> None:
    assert MilesConfig().rollout.rollout_engine == "auto"
    assert choose_launcher(MilesConfig(), one_engine(1), placed(HERE)) in LAUNCHERS.values()


def test_engines_that_share_host_memory_with_their_trainer_are_on_its_machine() -> None:
    require_shared_memory(placed(HERE, HERE))
    with pytest.raises(JobError, match=rf"--colocate: .*{HERE} has slot 0; {THERE} has slot 1"):
        require_shared_memory(placed(HERE, THERE))


def test_colocated_embedded_engines_on_several_machines_are_refused() -> None:
    config = with_rollout(MilesConfig(), rollout_engine="embedded")
    colocated = replace(config, cluster=replace(config.cluster, colocate=True))
    layout = Layout(num_slots=2, train_slots=(0, 1), engine_slots=((0,), (1,)))
    assert choose_launcher(config, layout, placed(HERE, THERE)) is embedded_launch
    with pytest.raises(JobError, match="machines do not share"):
        choose_launcher(colocated, layout, placed(HERE, THERE))


def test_an_embedded_engine_may_have_several_slots_but_not_several_gpus_or_machines() -> None:
    require_one_process(one_engine(2), placed(HERE, HERE))
    require_one_process(one_engine(1), placed(HERE, on_gpu=True))
    for several in (placed(HERE, HERE, on_gpu=True), placed(HERE, THERE)):
        with pytest.raises(JobError, match="--rollout-num-gpus-per-engine 2"):
            require_one_process(one_engine(2), several)


@pytest.mark.parametrize(
    ("machines", "router", "loopback"),
    [
        ((HERE, HERE), None, True),
        ((HERE, THERE), None, False),
        ((THERE, THERE), None, False),
        ((HERE, HERE), "127.0.0.1", True),
        ((HERE, HERE), HERE, True),
        ((HERE, HERE), "10.0.0.9", False),
        ((HERE, HERE), "router.example.org", False),
    ],
)
def test_engines_are_on_loopback_while_all_who_talk_to_them_are_on_the_drivers_machine(
    machines: tuple[str, ...], router: str | None, loopback: bool
) -> None:
    config = with_rollout(MilesConfig(), sglang_router_ip=router)
    assert serves_on_loopback(config, placed(*machines), HERE) is loopback


def test_each_part_of_an_engine_knows_its_rank_its_devices_and_where_the_parts_meet(
    tiny_qwen3: Path,
) -> None:
    config = with_rollout(MilesConfig(), hf_checkpoint=str(tiny_qwen3))
    config = replace(
        config, cluster=replace(config.cluster, rollout_num_gpus=8, rollout_num_gpus_per_engine=4)
    )
    part = EnginePart(
        engine=0,
        host=THERE,
        device_ids=(6, 7),
        num_nodes=2,
        node_rank=1,
        head=f"{HERE}:4567",
    )
    launch = sglang_launch(config, part, Path("log"))
    found = options(launch.arguments)
    expected = {
        "--host": THERE,
        "--tp-size": "4",
        "--nnodes": "2",
        "--node-rank": "1",
        "--dist-init-addr": f"{HERE}:4567",
    }
    assert expected.items() <= found.items()
    assert launch.device_ids == (6, 7)


def test_an_engine_of_one_machine_meets_nobody(tiny_qwen3: Path) -> None:
    config = with_rollout(MilesConfig(), hf_checkpoint=str(tiny_qwen3))
    part = EnginePart(engine=0, host="127.0.0.1")
    launch = sglang_launch(config, part, Path("log"))
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(launch.arguments)
    assert options(launch.arguments)["--host"] == "127.0.0.1"
    assert options(embedded_launch(config, part, Path("log")).arguments)["--host"] == "127.0.0.1"


def test_a_server_sees_its_devices_through_the_variable_that_its_holder_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in device_environment.VISIBLE_DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert device_environment.only_devices((3, 10)) == {"HIP_VISIBLE_DEVICES": "3,10"}


def test_an_engines_holder_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "import miles.ray.cluster, miles.ray.rollout.engine_holder\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
