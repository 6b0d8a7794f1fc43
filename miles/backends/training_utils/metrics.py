"""From the summed statistics of optimizer steps to the ``train/...`` metrics of a rollout.

What becomes of a sum (``LossOutput.sums``, added up over micro-batches and ranks):

================================  ==================================================================
in ``DENOMINATORS``               divided by the sum named there, both added up over the steps;
                                  left out where that is 0
in ``COUNTS``                     the total over the steps
in ``HIDDEN``                     not shown: only used by others
any other                         already a mean (divided by the step's global counts in the loss);
                                  averaged over the steps
================================  ==================================================================

Skipped steps take part in no mean, unless every step was skipped.
"""

from collections.abc import Mapping, Sequence

from miles.contracts.types import StepStats

DENOMINATORS: Mapping[str, str] = {
    "train_rollout_logprob_abs_diff": "compared_tokens",
    "train_rollout_kl": "compared_tokens",
}
"""Trainer against engine. The trainer's log-probs are those of the weights before the rollout's
first step; under ``--use-rollout-logprobs`` those are not computed, and steps after the first
compare the weights of the moment."""

COUNTS = frozenset({"invalid_rollout_log_probs", "invalid_log_ratios"})

HIDDEN = frozenset({"compared_tokens", "active_tokens", "ratio_sum", "ratio_square_sum"})


def finalize(steps: Sequence[StepStats]) -> dict[str, float]:
    """``train/...`` metrics of one rollout; names are those of the sums."""
    taken = [step for step in steps if not step.skipped] or list(steps)
    metrics = {"skipped_steps": float(sum(step.skipped for step in steps))}
    if steps:
        metrics["lr"] = steps[-1].learning_rate
        metrics["loss"] = _mean([step.loss for step in taken])
        metrics["grad_norm"] = _mean([step.grad_norm for step in taken])
    names = dict.fromkeys(name for step in steps for name in step.sums)
    for name in names:
        if name in COUNTS:
            metrics[name] = _total(steps, name)
        elif name in DENOMINATORS:
            # Nothing to compare is not the same as no difference.
            if count := _total(taken, DENOMINATORS[name]):
                metrics[name] = _total(taken, name) / count
        elif name not in HIDDEN:
            metrics[name] = _mean([step.sums[name] for step in taken if name in step.sums])
    ratios = [_effective_sample_ratio(step.sums) for step in taken if "ratio_sum" in step.sums]
    if ratios:
        metrics["ess_ratio"] = _mean(ratios)
    return {f"train/{name}": value for name, value in metrics.items()}


def _effective_sample_ratio(sums: Mapping[str, float]) -> float:
    """(sum of w)^2 / (n * sum of w^2) of the policy ratios w: 1 when all are equal."""
    denominator = sums["active_tokens"] * sums["ratio_square_sum"]
    return sums["ratio_sum"] ** 2 / denominator if denominator > 0 else 1.0


def _total(steps: Sequence[StepStats], name: str) -> float:
    return sum(step.sums.get(name, 0.0) for step in steps)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
