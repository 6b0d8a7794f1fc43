"""``--rm-type`` by name, and what a built-in reward looks like."""

import re
from collections.abc import Awaitable
from typing import Protocol

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.contracts.types import Sample
from miles.core.registry import Registry

BOXED_PREFIX = "boxed_"

NEEDS_LABEL = frozenset({"math", "f1", "exact_match"})


class BuiltinReward(Protocol):
    def __call__(
        self, sample: Sample, answer: str, config: MilesConfig
    ) -> float | dict[str, object] | Awaitable[float | dict[str, object]]:
        """Score ``answer``: the response without special tokens at its end, or its boxed part.

        It keeps to ``--rm-timeout-s`` by itself. Raises when there is no verdict.
        """
        ...


REWARDS: Registry[BuiltinReward] = Registry(
    "reward (--rm-type)",
    {
        "math": "miles.rollout.rewards.graded:math",
        "reasoning_gym": "miles.rollout.rewards.graded:reasoning_gym",
        "f1": "miles.rollout.rewards.answers:f1",
        "exact_match": "miles.rollout.rewards.answers:exact_match",
        "remote_rm": "miles.rollout.rewards.remote:remote_rm",
        "random": "miles.rollout.rewards.chance:random_reward",
        "deterministic_random": "miles.rollout.rewards.chance:deterministic_random",
    },
)


def check(config: MilesConfig) -> list[Problem]:
    """What is wrong with the reward flags."""
    problems = list[Problem]()
    name = config.reward.rm_type
    base = None if name is None else name.removeprefix(BOXED_PREFIX)
    if base is not None and base not in REWARDS:
        problems.append(Problem("--rm-type", name, f"there are: {', '.join(sorted(REWARDS))}"))
    gym = (config.data.prompt_data or "").startswith("reasoning_gym:")
    if base in NEEDS_LABEL and config.data.label_key is None and not gym:
        problems.append(Problem("--label-key", None, f"--rm-type {name} needs the label's column"))
    if base == "remote_rm" and config.reward.rm_url is None:
        problems.append(Problem("--rm-url", None, "--rm-type remote_rm needs the address"))
    if config.reward.group_rm and config.hooks.custom_rm_path is None:
        remedy = "built-in rewards score one sample; leave it out or give --custom-rm-path"
        problems.append(Problem("--group-rm", True, remedy))
    return problems


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, braces balanced; ``None`` without one."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None
