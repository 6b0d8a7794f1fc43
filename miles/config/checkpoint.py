"""Checkpoints and exports."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint: saving, resuming, exporting."""

    load: Annotated[
        str | None,
        Doc(
            "Directory to resume from: the parent of iter_* with its tracker. A fresh start: one "
            "that is missing, empty, or has neither a tracker nor iter_*."
        ),
        Flag(shared=True),
    ] = None
    save: Annotated[str | None, Doc("Checkpoint directory."), Flag(shared=True)] = None
    save_interval: Annotated[int | None, Doc("Rollouts between saves."), Flag(shared=True)] = None
    save_keep: Annotated[
        int | None,
        Doc("Keep the newest so many; never removes one asked for by the sentinel."),
    ] = None
    save_trigger_sentinel: Annotated[
        str | None, Doc("A file whose existence forces a save; removed when it is durable.")
    ] = None
    save_hf: Annotated[
        str | None,
        Doc("Also export a Hugging Face directory at each save; {rollout_id} is filled in."),
    ] = None
    async_save: Annotated[
        bool, Doc("Write checkpoints while training goes on."), Flag(shared=True)
    ] = False
    no_save_optim: Annotated[
        bool, Doc("Leave the optimizer out of checkpoints."), Flag(shared=True)
    ] = False
    convert_optimizer_state: Annotated[
        bool,
        Doc("Let --load read an optimizer state whose moments were saved in another dtype."),
    ] = False
