"""Which trainer rank and which engine sits on which device, and the placement group behind it."""

import asyncio
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.config.root import MilesConfig
from miles.core import device
from miles.ray import cluster
from miles.ray.errors import JobError, call_all

WAIT_TURN_S = 0.5

CPU_SHARE_OF_A_SLOT = 0.1
"""Without GPUs a slot is a process; several share a core."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many slots there are and who uses which. A slot is a GPU, or a process on a CPU."""

    num_slots: int
    train_slots: tuple[int, ...]
    """Slot of each trainer rank."""
    engine_slots: tuple[tuple[int, ...], ...]
    """Slots of each engine."""


def plan_layout(config: MilesConfig, *, with_engines: bool, with_trainer: bool) -> Layout:
    """Trainer ranks first, engines behind them; with ``--colocate`` on the same slots."""
    cluster = config.cluster
    num_train = cluster.num_train_ranks if with_trainer else 0
    num_rollout = (cluster.rollout_num_gpus or 0) if with_engines else 0
    first = 0 if cluster.colocate else num_train
    per_engine = cluster.rollout_num_gpus_per_engine
    engines = tuple(
        tuple(range(first + start, first + start + per_engine))
        for start in range(0, num_rollout, per_engine)
    )
    return Layout(
        num_slots=max(num_train, first + num_rollout),
        train_slots=tuple(range(num_train)),
        engine_slots=engines,
    )


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One bundle of the placement group."""

    bundle: int
    node_ip: str
    device_id: int | None
    """Physical id of the GPU; ``None`` on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The slots of a job, machine by machine, there in the order of the devices."""

    group: PlacementGroup | None
    """``None`` without slots."""
    slots: tuple[Slot, ...]
    on_gpu: bool

    def actor_options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray options of an actor on ``slot`` that takes ``share`` of it."""
        assert self.group is not None
        resources: dict[str, Any] = {"num_cpus": share * CPU_SHARE_OF_A_SLOT, "num_gpus": 0}
        if self.on_gpu:
            resources = {"num_cpus": share, "num_gpus": share}
        return {
            **resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group,
                placement_group_bundle_index=self.slots[slot].bundle,
            ),
        }

    def by_machine(self, slots: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Address of each machine in order, with those of the slots that are there."""
        runs = groupby(slots, key=lambda slot: self.slots[slot].node_ip)
        return [(address, tuple(run)) for address, run in runs]

    def is_all_on(self, address: str) -> bool:
        """Whether every slot is on the machine with this address."""
        return all(slot.node_ip == address for slot in self.slots)

    def describe(self) -> str:
        """Which slots are where, for a message."""
        machines = self.by_machine(range(len(self.slots)))
        return "; ".join(f"{address} has {_span(slots)}" for address, slots in machines)

    def remove(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)


def _span(slots: Sequence[int]) -> str:
    first, last = slots[0], slots[-1]
    return f"slot {first}" if first == last else f"slots {first}-{last}"


def slot_order(slot: Slot) -> tuple[int, int]:
    """Sort key: node address, then device id, both as numbers."""
    return int(ipaddress.ip_address(slot.node_ip)), slot.device_id or 0


async def reserve(layout: Layout, timeout_s: float) -> Placement:
    """Reserve the layout's slots. Raises ``JobError`` that names what is missing in time, or at
    once where no machine can join."""
    on_gpu = device.has_accelerator() or ray.cluster_resources().get("GPU", 0) > 0
    if layout.num_slots == 0:
        return Placement(group=None, slots=(), on_gpu=on_gpu)
    bundle = {"GPU": 1.0, "CPU": 1.0} if on_gpu else {"CPU": CPU_SHARE_OF_A_SLOT}
    if cluster.is_own() and not _has_room(bundle, layout.num_slots):
        when = "on this machine, the only one without RAY_ADDRESS"
        more = "join a cluster of more machines (RAY_ADDRESS)"
        raise JobError(_missing(bundle, layout.num_slots, when, more))
    group = placement_group([bundle] * layout.num_slots, strategy="PACK")
    try:
        if not await _is_ready(group, timeout_s):
            when = f"after {timeout_s:g} s (--placement-timeout-s)"
            raise JobError(_missing(bundle, layout.num_slots, when, "add machines"))
        slots = await _find_slots(group, bundle, timeout_s)
    except BaseException:
        # A head that is gone would be asked for a minute, and then Ray ends this process.
        if not cluster.is_lost():
            remove_placement_group(group)
        raise
    return Placement(group=group, slots=tuple(sorted(slots, key=slot_order)), on_gpu=on_gpu)


def require_whole_machines(layout: Layout, placement: Placement, ranks_per_node: int) -> None:
    """The ranks of a trainer's node are on one machine; an engine is on one, or in equal parts on
    several.

    Raises ``JobError`` with the layout that was found.
    """
    wrong: list[str] = []
    ranks = layout.train_slots
    for first in range(0, len(ranks), ranks_per_node):
        node = ranks[first : first + ranks_per_node]
        if len(placement.by_machine(node)) > 1:
            wrong.append(
                f"trainer ranks {first}-{first + len(node) - 1} ({_span(node)}) are one node's "
                "(--actor-num-gpus-per-node), and need one machine"
            )
    for index, slots in enumerate(layout.engine_slots):
        parts = [len(part) for _, part in placement.by_machine(slots)]
        if len(set(parts)) > 1:
            wrong.append(
                f"engine {index} ({_span(slots)}, --rollout-num-gpus-per-engine) would be divided "
                f"{' + '.join(map(str, parts))}, and needs one machine or equal parts of several"
            )
    if wrong:
        raise JobError(
            f"the free slots do not fit this layout: {placement.describe()}; but "
            + "; ".join(wrong)
            + ". Free whole machines, or choose numbers that fit those slots"
        )


async def _is_ready(group: PlacementGroup, timeout_s: float) -> bool:
    """Waits in short turns: a thread in one long wait would outlive an interrupt."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(group.wait, WAIT_TURN_S):
        if time.monotonic() > deadline:
            return False
    return True


async def _find_slots(
    group: PlacementGroup, bundle: dict[str, float], timeout_s: float
) -> list[Slot]:
    """Ask each bundle where it is, or one on each machine where none has a GPU: a worker takes a
    second to start. The first task also shows whether workers start at all."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first_on = {node: index for index, node in sorted(nodes.items(), reverse=True)}
    probed = sorted(nodes) if "GPU" in bundle else sorted(first_on.values())
    probes = {
        f"slot {index}": _probe.options(
            num_cpus=bundle["CPU"] / 10,
            num_gpus=0.1 if "GPU" in bundle else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in probed
    }
    try:
        found = await asyncio.wait_for(call_all(probes, during="start"), timeout_s)
    except TimeoutError as error:
        raise JobError(
            f"the reserved slots started no worker within {timeout_s:g} s (--placement-timeout-s); "
            "Ray's logs on their machines say why"
        ) from error
    answers = dict(zip(probed, found, strict=True))
    slots: list[Slot] = []
    for index, node in sorted(nodes.items()):
        node_ip, device_id = answers.get(index, answers[first_on[node]])
        slots.append(Slot(bundle=index, node_ip=node_ip, device_id=device_id))
    return slots


@ray.remote
def _probe() -> tuple[str, int | None]:
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return ray.util.get_node_ip_address(), int(ids[0]) if ids else None


def _has_room(bundle: dict[str, float], num_slots: int) -> bool:
    """Whether the machine that is the cluster would hold the slots if it did nothing else."""
    total = ray.cluster_resources()
    return all(num_slots * amount <= total.get(name, 0) + 1e-6 for name, amount in bundle.items())


def _missing(bundle: dict[str, float], num_slots: int, when: str, more: str) -> str:
    needed = {name: amount * num_slots for name, amount in bundle.items()}
    total, free = ray.cluster_resources(), ray.available_resources()
    lines = [
        f"{name}: needed {amount:g}, in the cluster {total.get(name, 0):g}, "
        f"free {free.get(name, 0):g}"
        for name, amount in needed.items()
    ]
    return (
        f"no room for {num_slots} slots {when}: "
        + "; ".join(lines)
        + ". Lower --actor-num-gpus-per-node, --actor-num-nodes or --rollout-num-gpus, use "
        f"--colocate, or {more}."
    )
