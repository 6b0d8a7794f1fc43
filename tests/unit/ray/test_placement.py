"""Layout and order of slots."""

from dataclasses import replace

from miles.config.cluster import ClusterConfig
from miles.config.root import MilesConfig
from miles.ray.placement import Slot, plan_layout, slot_order


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
