"""``--rm-type`` by name, and what a built-in reward looks like."""

import re
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.values import did_you_mean
from miles.contracts.types import Sample
from miles.core.registry import Registry

BOXED_PREFIX = "boxed_"

NEEDS_LABEL = frozenset({"math", "f1", "exact_match"})
"""They compare the answer with the label as text. ``reasoning_gym`` does so for some rows."""


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
        problems.append(Problem("--rm-type", name, _rewards_there_are(name or "")))
    missing = _missing_label_key(config)
    if base in NEEDS_LABEL and missing is not None:
        problems.append(Problem(missing, None, f"--rm-type {name} needs the label's column"))
    url = config.reward.rm_url
    if base == "remote_rm" and url is None:
        problems.append(Problem("--rm-url", None, "--rm-type remote_rm needs the address"))
    if url is not None and not _is_http_url(url):
        remedy = "is no address; give http://host:port/path or https://..."
        problems.append(Problem("--rm-url", url, remedy))
    if config.reward.group_rm and config.hooks.custom_rm_path is None:
        remedy = "built-in rewards score one sample; leave it out or give --custom-rm-path"
        problems.append(Problem("--group-rm", True, remedy))
    return problems


def builtin_of(metadata: Mapping[str, Any], config: MilesConfig) -> str | None:
    """The built-in reward of a row, as it names it or ``--rm-type`` does; ``None`` where there is
    none. Raises ``ValueError`` for a name that no reward has."""
    name = metadata.get("rm_type")
    if name is None:
        name = config.reward.rm_type
    if name is None:
        return None
    if not isinstance(name, str) or name.removeprefix(BOXED_PREFIX) not in REWARDS:
        raise ValueError(f"no reward is called {name!r}; {_rewards_there_are(name)}")
    return name


def reads_label(metadata: Mapping[str, Any], config: MilesConfig) -> bool:
    """Whether the reward of a row compares its label as text, and so needs one.

    A reward of the user's gets whatever the row has. Raises ``ValueError`` for a row that asks for
    what no built-in reward can do; ``check`` has the problem of a wrong ``--rm-type``.
    """
    if config.hooks.custom_rm_path is not None:
        return False
    named = metadata.get("rm_type") is not None
    name = builtin_of(metadata, config) if named else config.reward.rm_type
    base = None if name is None else name.removeprefix(BOXED_PREFIX)
    if base != "reasoning_gym":
        return base in NEEDS_LABEL
    if "reasoning_gym" in metadata:
        return False
    if "source_dataset" not in metadata:
        raise ValueError("the row's metadata names no reasoning-gym family (source_dataset)")
    return True


def _missing_label_key(config: MilesConfig) -> str | None:
    """The flag that is to name the label's column; reasoning-gym's problems have their own."""

    def has_columns(spec: str | None) -> bool:
        return not (spec or "").startswith("reasoning_gym:")

    if config.data.label_key is None and has_columns(config.data.prompt_data):
        return "--label-key"
    key = config.evaluation.eval_label_key or config.data.label_key
    if key is None and any(map(has_columns, config.evaluation.eval_prompt_data[1::2])):
        return "--eval-label-key"
    return None


def _rewards_there_are(name: Any) -> str:
    hint = did_you_mean(name, list(REWARDS)) if isinstance(name, str) else ""
    return f"there are: {', '.join(sorted(REWARDS))}. {hint}".rstrip(" .")


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        # Reading the port checks it.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, braces balanced; ``None`` without one."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None
