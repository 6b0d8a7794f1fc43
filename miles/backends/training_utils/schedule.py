"""The learning rate as a pure function of the optimizer step.

The formulas are those of Megatron-core's ``OptimizerParamScheduler``, counted in optimizer steps.
"""

import math

from miles.config.errors import ConfigError, Problem
from miles.config.optimizer import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of the optimizer step that follows ``step`` completed ones (the first is 0).

    ``total_steps`` is what the schedule spans unless ``--lr-decay-iters`` says otherwise. After
    the span the rate stays at ``--min-lr`` (``constant`` stays at ``--lr``).
    """
    decay_steps = config.lr_decay_iters if config.lr_decay_iters is not None else total_steps
    warmup_steps = float(config.lr_warmup_iters)
    if config.lr_warmup_fraction is not None:
        warmup_steps = config.lr_warmup_fraction * decay_steps
    if warmup_steps > 0 and step <= warmup_steps:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "inverse-square-root":
        root = math.sqrt(max(warmup_steps, 1) / max(step, 1))
        return config.min_lr if step > decay_steps else max(config.min_lr, config.lr * root)
    if step >= decay_steps:
        return config.min_lr
    return config.min_lr + (config.lr - config.min_lr) * _decay(
        step, config, warmup_steps, decay_steps
    )


def _decay(step: int, config: OptimizerConfig, warmup_steps: float, decay_steps: int) -> float:
    """1 at the end of the warm-up, falling to 0 at ``decay_steps``."""
    if config.lr_decay_style == "WSD":
        return _final_decay(step, config, decay_steps)
    ratio = (step - warmup_steps) / (decay_steps - warmup_steps)
    if config.lr_decay_style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return 1.0 - ratio


def _final_decay(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    if config.lr_wsd_decay_iters is None:
        raise ConfigError(
            [Problem("--lr-wsd-decay-iters", None, "--lr-decay-style WSD needs its length")]
        )
    start = decay_steps - config.lr_wsd_decay_iters
    if step <= start:
        return 1.0
    ratio = (step - start) / config.lr_wsd_decay_iters
    if config.lr_wsd_decay_style == "linear":
        return 1.0 - ratio
    if config.lr_wsd_decay_style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if config.lr_wsd_decay_style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    return 2.0 * 0.5**ratio - 1.0
