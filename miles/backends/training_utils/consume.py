"""One rollout to optimizer steps: the driver of ``train``, written once for all backends."""

from collections.abc import Sequence
from itertools import chain

from miles.backends.training_utils.advantages import compute_advantages
from miles.backends.training_utils.losses import make_loss
from miles.backends.training_utils.metrics import finalize
from miles.backends.training_utils.packing import build_micro_batches, with_fields
from miles.config.derived import is_supervised, needs_reference
from miles.config.root import MilesConfig
from miles.contracts.hooks import LossScale
from miles.contracts.trainer import PolicyOps, WeightsTag
from miles.contracts.types import MicroBatch, StepStats, TrainBatch, TrainStats
from miles.core import device
from miles.core.timer import Timer

Steps = list[list[MicroBatch]]


def consume(
    ops: PolicyOps, shard: TrainBatch, config: MilesConfig, *, timer: Timer | None = None
) -> TrainStats:
    """Take the optimizer steps of this rank's shard. Collective over the trainer's ranks.

    The spans of ``timer`` (``ref_log_probs``, ``log_probs``, ``advantages``, ``optimizer_steps``,
    and what the caller added before) are taken and returned as ``perf/..._time`` in seconds.
    """
    timer = timer if timer is not None else Timer()
    packed = config.data.use_dynamic_batch_size
    steps = build_micro_batches(shard, packed=packed, device=device.current_device())
    if not is_supervised(config):
        steps = _prepare(ops, steps, config, timer)
    stats: list[StepStats] = []
    with timer.span("optimizer_steps"):
        for step, num_samples, num_tokens in zip(
            steps, shard.step_num_samples, shard.step_num_tokens, strict=True
        ):
            scale = LossScale(num_samples=num_samples, num_tokens=num_tokens)
            stats.append(ops.optimizer_step(step, make_loss(config, scale)))
    seconds = {f"perf/{name}_time": value for name, value in timer.take().items()}
    return TrainStats(metrics={**finalize(stats), **seconds}, steps=stats)


def _prepare(ops: PolicyOps, steps: Steps, config: MilesConfig, timer: Timer) -> Steps:
    """Fill in what the policy loss needs beside the forward pass of its own step."""
    if needs_reference(config):
        with timer.span("ref_log_probs"):
            steps = _with_log_probs(ops, steps, "ref")
    first = _first_step_with_old_log_probs(config)
    if first is not None:
        with timer.span("log_probs"):
            steps = steps[:first] + _with_log_probs(ops, steps[first:], "actor")
    with timer.span("advantages"):
        flat = compute_advantages(list(chain.from_iterable(steps)), config, ops.parallel)
        steps = _regroup(flat, steps)
    # The first step's own log-probs are those of the old policy: its ratio is then exactly 1.
    return [[with_fields(b, old_log_probs_R=None) for b in step] for step in steps[:1]] + steps[1:]


def _first_step_with_old_log_probs(config: MilesConfig) -> int | None:
    """From which step on a pass must fetch the log-probs of the weights before the rollout.

    The first step has them from its own forward pass, unless rewards depend on them or a hook waits
    for that pass.
    """
    if config.algorithm.use_rollout_logprobs:
        return None
    hooked = config.hooks.custom_megatron_before_log_prob_hook_path is not None
    return 0 if config.algorithm.kl_coef != 0 or hooked else 1


def _with_log_probs(ops: PolicyOps, steps: Steps, weights: WeightsTag) -> Steps:
    """One pass over all micro-batches of these steps; none when there is no step."""
    flat = list(chain.from_iterable(steps))
    if not flat:
        return steps
    field = "ref_log_probs_R" if weights == "ref" else "old_log_probs_R"
    log_probs = ops.log_probs(flat, weights=weights)
    # Once a pass, so that its time is not that of whatever asks the device for a number next.
    device.synchronize()
    return _regroup(
        [with_fields(b, **{field: values}) for b, values in zip(flat, log_probs, strict=True)],
        steps,
    )


def _regroup(flat: Sequence[MicroBatch], like: Steps) -> Steps:
    batches = iter(flat)
    return [[next(batches) for _ in step] for step in like]
