"""Where trainer and engines sit."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cluster: where trainer and engines sit."""

    train_backend: Annotated[Literal["megatron", "fsdp"], Doc("Training backend.")] = "megatron"
    actor_num_nodes: Annotated[int, Doc("Nodes that train.")] = 1
    actor_num_gpus_per_node: Annotated[
        int, Doc("Trainer ranks on each node, one GPU each (on a CPU: process slots).")
    ] = 8
    context_parallel_size: Annotated[
        int,
        Doc("Ranks that split the tokens of a sample between them (megatron backend only)."),
        Flag(shared=True),
    ] = 1
    num_gpus_per_node: Annotated[
        int,
        Doc(
            "Physical accelerators of a machine, which trainer ranks and engines must fit; without "
            "accelerators a slot is a process, and nothing has to."
        ),
    ] = 8
    rollout_num_gpus: Annotated[
        int | None,
        Doc(
            "GPUs for the engines. With --colocate it is always the trainer's number; with "
            "--rollout-external it follows from the engines."
        ),
    ] = None
    rollout_num_gpus_per_engine: Annotated[
        int, Doc("GPUs of one engine (its tensor-parallel size).")
    ] = 1
    colocate: Annotated[bool, Doc("Share the training devices with the engines, taking turns.")] = (
        False
    )
    distributed_timeout_minutes: Annotated[
        int, Doc("Time-out of collectives."), Flag(shared=True)
    ] = 10
    placement_timeout_s: Annotated[
        float,
        Doc(
            "How long to wait for the cluster's resources, or for engines of --rollout-external, "
            "before naming what is missing."
        ),
    ] = 300.0
    train_env_vars: Annotated[
        dict[str, Any], Doc("Extra environment of the trainer processes (JSON object).")
    ] = field(default_factory=dict[str, Any])

    @property
    def num_train_ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node
