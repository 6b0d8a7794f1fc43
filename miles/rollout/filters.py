"""Filters for ``--dynamic-sampling-filter-path``: which finished groups are worth training on."""

from miles.config.root import MilesConfig
from miles.contracts.hooks import FilterDecision
from miles.contracts.types import Group, Status
from miles.rollout.batch import is_zero_variance, raw_reward


def check_reward_nonzero_std(group: Group, config: MilesConfig) -> FilterDecision:
    """Keep a group whose rewards differ: one of equal rewards has no advantage to learn from.

    Samples that failed have no reward to compare. A group of a single one is kept; its spread says
    nothing.
    """
    rewards = [raw_reward(s, config) for s in group if s.status is not Status.FAILED]
    if len(rewards) < 2 <= len(group) or not rewards:
        return FilterDecision(False, "failed")
    if is_zero_variance(rewards):
        return FilterDecision(False, f"zero_std_{rewards[0]:.1f}")
    return FilterDecision(True)


def check_no_aborted(group: Group, config: MilesConfig) -> FilterDecision:
    """Keep a group in which no sample was stopped from outside."""
    aborted = any(sample.status is Status.ABORTED for sample in group)
    return FilterDecision(not aborted, "aborted")
