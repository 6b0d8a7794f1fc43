"""Who leaves the device in which phase."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc

RolloutLevel = Literal["kv_cache", "weight"]


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
