"""The optimizer and its schedule."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: AdamW and its learning-rate schedule, counted in optimizer steps."""

    lr: Annotated[float, Doc("Peak learning rate."), Flag(shared=True)] = 1e-6
    min_lr: Annotated[float, Doc("Learning rate after the decay."), Flag(shared=True)] = 0.0
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        Doc("Schedule."),
        Flag(shared=True),
    ] = "constant"
    lr_decay_iters: Annotated[
        int | None,
        Doc("Optimizer steps of the schedule, warm-up included; by default the whole run."),
        Flag(shared=True),
    ] = None
    lr_warmup_iters: Annotated[int, Doc("Warm-up steps."), Flag(shared=True)] = 0
    lr_warmup_fraction: Annotated[
        float | None, Doc("Warm-up as a fraction of --lr-decay-iters."), Flag(shared=True)
    ] = None
    lr_warmup_init: Annotated[
        float, Doc("Learning rate at the start of the warm-up."), Flag(shared=True)
    ] = 0.0
    lr_wsd_decay_iters: Annotated[
        int | None, Doc("WSD: steps of the final decay."), Flag(shared=True)
    ] = None
    lr_wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"],
        Doc("WSD: form of the final decay."),
        Flag(shared=True),
    ] = "exponential"
    weight_decay: Annotated[float, Doc("Weight decay."), Flag(shared=True)] = 0.0
    adam_beta1: Annotated[float, Doc("First-moment decay."), Flag(shared=True)] = 0.9
    adam_beta2: Annotated[float, Doc("Second-moment decay."), Flag(shared=True)] = 0.95
    adam_eps: Annotated[float, Doc("Adam epsilon."), Flag(shared=True)] = 1e-8
    clip_grad: Annotated[float, Doc("Gradient-norm clip; 0 is off."), Flag(shared=True)] = 1.0
