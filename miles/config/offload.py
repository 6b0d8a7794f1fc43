"""Who leaves the device in which phase."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc

RolloutLevel = Literal["kv_cache", "weight"]
Target = Literal["cpu", "disk"]
MomentDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Offload: who leaves the device in which phase."""

    offload_train: Annotated[
        bool | None, Doc("The trainer sleeps while engines generate; on with --colocate.")
    ] = None
    offload_rollout: Annotated[
        bool | None, Doc("Engines release memory while the trainer trains; on with --colocate.")
    ] = None
    offload_rollout_level: Annotated[
        tuple[RolloutLevel, ...],
        Doc("What --offload-rollout releases, beside graphs: key/value cache, weights, or both."),
    ] = ("kv_cache", "weight")
    offload_train_target: Annotated[
        Target, Doc("Where the sleeping trainer's state lies: pinned host memory, or a local disk.")
    ] = "cpu"
    offload_train_disk_dir: Annotated[
        str | None,
        Doc(
            "Directory on a disk of each trainer's machine, for --offload-train-target disk; by "
            "default $SCRATCH (else /scratch) with miles_train_offload_<uid>."
        ),
    ] = None
    offload_train_disk_chunk_mb: Annotated[
        int,
        Doc("MiB that move between device and disk at once; host memory holds two or three."),
    ] = 256
    stream_optimizer_state_to_disk: Annotated[
        bool,
        Doc(
            "Keep Adam's moments and the fp32 master weights on that disk also while training: the "
            "step brings in one chunk at a time."
        ),
    ] = False
    stream_optimizer_state_moment_dtype: Annotated[
        MomentDtype, Doc("Of the moments on disk; bf16 moves a third less, and rounds.")
    ] = "fp32"
    rematerialize_param_from_master_weight: Annotated[
        bool,
        Doc(
            "A sleeping trainer keeps no copy of its parameters: they are made anew from the "
            "optimizer's master weights."
        ),
    ] = False
    check_rematerialize_param_from_master_weight: Annotated[
        bool, Doc("Compare the parameters before and after, in the first two sleeps.")
    ] = False
