"""How new weights reach the engines."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Weight sync: how new weights reach the engines."""

    update_weight_transfer_mode: Annotated[
        Literal["broadcast"],
        Doc("Transport when trainer and engines do not share devices."),
    ] = "broadcast"
    update_weight_buffer_size: Annotated[int, Doc("Bytes of one bucket.")] = 512 * 1024**2
    update_weight_timeout_s: Annotated[
        float, Doc("Time-out of each call and collective of an update.")
    ] = 300.0
    check_weight_update_equal: Annotated[
        bool, Doc("Compare checksums of every tensor after every update.")
    ] = False
