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
from miles.rollout import gym

BOXED_PREFIX = "boxed_"
REMOTE = "remote_rm"

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
        REMOTE: "miles.rollout.rewards.remote:remote_rm",
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
    if base == REMOTE and url is None:
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
    if named and base == REMOTE and config.reward.rm_url is None:
        raise ValueError("metadata.rm_type is remote_rm; give its address (--rm-url)")
    if base != "reasoning_gym":
        return base in NEEDS_LABEL
    _require_family(metadata)
    return "reasoning_gym" not in metadata


def naming_of(metadata: Mapping[str, Any], config: MilesConfig) -> str:
    """What names the reward of a row, for messages: the flag with its value, or the row."""
    if config.hooks.custom_rm_path is not None:
        return f"--custom-rm-path {config.hooks.custom_rm_path}"
    if metadata.get("rm_type") is not None:
        return f"metadata.rm_type {metadata['rm_type']} of the row"
    return f"--rm-type {config.reward.rm_type}"


def asks_remote(metadata: Mapping[str, Any]) -> bool:
    """Whether a row itself names the reward of ``--rm-url``."""
    name = metadata.get("rm_type")
    return isinstance(name, str) and name.removeprefix(BOXED_PREFIX) == REMOTE


def _require_family(metadata: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the row says which family grades it, as Miles writes it
    (``reasoning_gym``) or as the family itself does (``source_dataset``)."""
    if "reasoning_gym" in metadata:
        recipe = metadata["reasoning_gym"]
        if not isinstance(recipe, dict) or set(recipe) != {"family", "kwargs", "index"}:
            raise ValueError("metadata.reasoning_gym must be {family, kwargs, index}")
        key, family = "reasoning_gym.family", recipe["family"]
    elif "source_dataset" in metadata:
        key, family = "source_dataset", metadata["source_dataset"]
    else:
        raise ValueError("the row's metadata names no reasoning-gym family (source_dataset)")
    unknown = gym.unknown_family(family)
    if unknown is not None:
        raise ValueError(f"metadata.{key} is {family!r}: {unknown}")


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
