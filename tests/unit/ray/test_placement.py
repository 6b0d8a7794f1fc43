"""Layout and order of slots."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from ray.util.placement_group import PlacementGroup

from miles.config.cluster import ClusterConfig
from miles.config.root import MilesConfig
from miles.ray.errors import JobError
from miles.ray.placement import (
    Layout,
    Placement,
    Slot,
    plan_layout,
    require_whole_machines,
    slot_order,
)


def config(**cluster: object) -> MilesConfig:
    return replace(MilesConfig(), cluster=ClusterConfig(**cluster))  # pyright: ignore[reportArgumentType]


def test_disaggregated_engines_sit_behind_the_trainer() -> None:
    layout = plan_layout(
        config(actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2),
        with_engines=True,
        with_trainer=True,
    )
    assert layout.num_slots == 6
    assert layout.train_slots == (0, 1)
    assert layout.engine_slots == ((2, 3), (4, 5))


def test_colocated_engines_share_the_trainers_slots() -> None:
    layout = plan_layout(
        config(actor_num_gpus_per_node=2, rollout_num_gpus=2, colocate=True),
        with_engines=True,
        with_trainer=True,
    )
    assert layout.num_slots == 2
    assert layout.engine_slots == ((0,), (1,))


def test_without_engines_or_trainer_only_the_other_side_takes_slots() -> None:
    both = config(actor_num_gpus_per_node=2, rollout_num_gpus=1)
    assert plan_layout(both, with_engines=False, with_trainer=True).num_slots == 2
    assert plan_layout(both, with_engines=True, with_trainer=False).engine_slots == ((0,),)


def test_device_ids_and_node_addresses_are_ordered_as_numbers() -> None:
    ids = [Slot(bundle=i, node_ip="10.0.0.2", device_id=i) for i in (10, 2, 11, 0, 1)]
    other = Slot(bundle=99, node_ip="10.0.0.10", device_id=0)
    ordered = sorted([other, *ids], key=slot_order)
    assert [s.device_id for s in ordered[:5]] == [0, 1, 2, 10, 11]
    assert ordered[5] is other


def placed(*nodes: str) -> Placement:
    slots = tuple(Slot(bundle=i, node_ip=ip, device_id=None) for i, ip in enumerate(nodes))
    return Placement(group=PlacementGroup.empty(), slots=slots, on_gpu=True)


A, B = "10.0.0.1", "10.0.0.2"


def test_slots_are_told_by_machine() -> None:
    placement = placed(A, A, A, B, B)
    assert placement.by_machine((1, 2, 3, 4)) == [(A, (1, 2)), (B, (3, 4))]
    assert placement.describe() == f"{A} has slots 0-2; {B} has slots 3-4"
    assert not placement.is_all_on(A)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "train", "engines"),
    [
        ((A, A, A, A), 2, (0, 1), ((2, 3),)),
        ((A, A, B, B), 2, (0, 1, 2, 3), ()),
        ((A, A, B, B), 2, (0, 1), ((2,), (3,))),
        # Half of the engine on each machine.
        ((A, A, B, B), 8, (), ((0, 1, 2, 3),)),
        # Two nodes' ranks on one machine are no worse than on two.
        ((A, A, A, A), 2, (0, 1, 2, 3), ()),
    ],
)
def test_layouts_that_machines_can_hold(
    nodes: tuple[str, ...],
    ranks_per_node: int,
    train: tuple[int, ...],
    engines: tuple[tuple[int, ...], ...],
) -> None:
    layout = Layout(num_slots=len(nodes), train_slots=train, engine_slots=engines)
    require_whole_machines(layout, placed(*nodes), ranks_per_node)


def test_everything_that_is_torn_apart_is_named_with_the_layout_that_was_found() -> None:
    layout = Layout(num_slots=6, train_slots=(0, 1), engine_slots=((2, 3, 4, 5),))
    with pytest.raises(JobError) as caught:
        require_whole_machines(layout, placed(A, B, B, B, B, "10.0.0.3"), 2)
    message = str(caught.value)
    assert f"{A} has slot 0; {B} has slots 1-4; 10.0.0.3 has slot 5" in message
    assert "trainer ranks 0-1 (slots 0-1)" in message
    assert "engine 0 (slots 2-5, --rollout-num-gpus-per-engine) would be divided 3 + 1" in message


TOO_MANY = """
import asyncio
from miles.ray import cluster
from miles.ray.errors import JobError
from miles.ray.placement import Layout, reserve

cluster.start()
layout = Layout(num_slots=100000, train_slots=tuple(range(100000)), engine_slots=())
try:
    asyncio.run(asyncio.wait_for(reserve(layout, 300), 120))
except JobError as error:
    print(error)
cluster.stop()
"""


def test_what_no_machine_can_bring_is_not_waited_for() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        result = subprocess.run(
            [sys.executable, "-c", TOO_MANY],
            env={**environment, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert "no room for 100000 slots on this machine" in result.stdout, result.stderr
    assert "RAY_ADDRESS" in result.stdout
