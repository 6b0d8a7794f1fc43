"""What a run shows and records."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Observability: what a run shows and records."""

    run_dir: Annotated[
        str | None, Doc("Metrics, samples and pictures; by default runs/<time>.")
    ] = None
    tensorboard_dir: Annotated[
        str | None, Doc("Also write TensorBoard events there."), Flag(shared=True)
    ] = None
    use_wandb: Annotated[bool, Doc("Also log to Weights & Biases.")] = False
    wandb_mode: Annotated[Literal["online", "offline", "disabled"] | None, Doc("W&B mode.")] = None
    wandb_dir: Annotated[str | None, Doc("W&B directory.")] = None
    wandb_team: Annotated[str | None, Doc("W&B entity.")] = None
    wandb_project: Annotated[str | None, Doc("W&B project."), Flag(shared=True)] = None
    wandb_group: Annotated[str | None, Doc("W&B group.")] = None
    wandb_run_id: Annotated[str | None, Doc("W&B run to resume.")] = None
    save_debug_rollout_data: Annotated[
        str | None, Doc("Record every rollout to this path; {rollout_id} is filled in.")
    ] = None
    load_debug_rollout_data: Annotated[
        str | None, Doc("Train from recorded rollouts, without engines.")
    ] = None
    debug_rollout_only: Annotated[bool, Doc("Generate and score; nothing is trained or saved.")] = (
        False
    )
    debug_exit_after_rollout: Annotated[
        int | None, Doc("Stop after so many rollouts of this process.")
    ] = None
