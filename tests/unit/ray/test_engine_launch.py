"""Which engine a job starts, and how its holder starts and ends it."""

import pytest
from ray.util.placement_group import PlacementGroup

from miles.config.root import MilesConfig
from miles.ray.errors import JobError
from miles.ray.placement import Placement, Slot
from miles.ray.rollout.engine_launch import LAUNCHERS, choose_launcher, require_one_machine


def test_the_default_engine_is_one_that_can_be_started() -> None:
    assert MilesConfig().rollout.rollout_engine == "auto"
    assert choose_launcher(MilesConfig()) in LAUNCHERS.values()


def placed(*nodes: str) -> Placement:
    slots = tuple(Slot(bundle=i, node_ip=ip, device_id=None) for i, ip in enumerate(nodes))
    return Placement(group=PlacementGroup.empty(), slots=slots, on_gpu=False)


def test_embedded_engines_and_their_trainer_must_be_on_the_drivers_machine() -> None:
    require_one_machine(placed("10.0.0.1", "10.0.0.1"), here="10.0.0.1")
    with pytest.raises(JobError, match=r"some are on 10\.0\.0\.2 and not on 10\.0\.0\.1"):
        require_one_machine(placed("10.0.0.1", "10.0.0.2"), here="10.0.0.1")
