"""Filters for ``--dynamic-sampling-filter-path``: which finished groups are worth training on."""

from miles.config.root import MilesConfig
from miles.contracts.hooks import FilterDecision
from miles.contracts.types import Group, Status
from miles.rollout.rewards.score import reward_value

ROUNDING = 1e-6
"""Rewards that differ by less, relative to 1 or to the largest, are equal."""


def check_reward_nonzero_std(group: Group, config: MilesConfig) -> FilterDecision:
    """Keep a group whose rewards differ: one of equal rewards has no advantage to learn from.

    A group of a single sample is kept; its spread says nothing.
    """
    rewards = [reward_value(s.reward, config.reward.reward_key) for s in group]
    low, high = min(rewards), max(rewards)
    if len(rewards) > 1 and high - low <= ROUNDING * max(1.0, abs(low), abs(high)):
        return FilterDecision(False, f"zero_std_{high:.1f}")
    return FilterDecision(True)


def check_no_aborted(group: Group, config: MilesConfig) -> FilterDecision:
    """Keep a group in which no sample was stopped from outside."""
    aborted = any(sample.status is Status.ABORTED for sample in group)
    return FilterDecision(not aborted, "aborted")
