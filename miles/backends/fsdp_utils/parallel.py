"""The mesh of this backend: ``dp_replicate × dp_shard``. It has no other axis."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles.config.errors import ConfigError, Problem
from miles.contracts.parallel import ParallelState
from miles.core import device, distributed


def build_mesh(dp_replicate_size: int, timeout_minutes: float) -> DeviceMesh:
    """Mesh for ``fully_shard``: sharded inside a replica of consecutive ranks.

    Two axes ``("dp_replicate", "dp_shard")`` under hybrid sharding, else ``("dp_shard",)`` alone:
    a replicate axis of one would only add an all-reduce. Raises ``ConfigError``.
    """
    world_size = distributed.world_size()
    if dp_replicate_size < 1 or world_size % dp_replicate_size:
        remedy = f"must divide the {world_size} trainer ranks"
        raise ConfigError([Problem("--dp-replicate-size", dp_replicate_size, remedy)])
    if dp_replicate_size == 1:
        # Its group is the default one.
        return init_device_mesh(device.device_type(), (world_size,), mesh_dim_names=("dp_shard",))
    ranks = torch.arange(world_size).view(dp_replicate_size, -1)
    # init_device_mesh would give these groups PyTorch's own time-out.
    timeout = timedelta(minutes=timeout_minutes)
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(members.tolist(), timeout)[0]
        for members in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(
        groups, device.device_type(), ranks, mesh_dim_names=("dp_replicate", "dp_shard")
    )


def parallel_state() -> ParallelState:
    """Every rank has its own samples, also inside a replica."""
    world_size = distributed.world_size()
    return ParallelState(
        rank=distributed.rank(),
        world_size=world_size,
        dp_rank=distributed.rank(),
        dp_size=world_size,
        dp_group=dist.group.WORLD if world_size > 1 else None,
    )
