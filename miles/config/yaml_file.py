"""A YAML file of flags as arguments, so that one path reads both it and the command line."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.config.errors import ConfigError, Problem
from miles.config.flags import FlagSpec
from miles.config.values import ITEM_SEPARATOR, is_tuple, takes_object

NOT_IN_A_FILE = ("config", "help", "help-megatron", "help-sglang", "help-router")


def read_arguments(path: str, specs: Sequence[FlagSpec]) -> tuple[list[str], list[Problem]]:
    """The arguments that a file stands for. Raises ``ConfigError`` for an unreadable file.

    Keys are flag names without the dashes in front, with ``-`` or ``_``. ``null`` leaves a flag at
    its default. A key that is no flag of ours becomes an argument too: whoever handles unknown
    arguments decides about it.
    """
    names = {option.removeprefix("--"): (spec, option) for spec in specs for option in spec.options}
    arguments: list[str] = []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    content, repeated = _load(path)
    for key in repeated:
        remedy = f"stands more than once in {path}; leave one"
        problems.append(Problem(f"--{key.replace('_', '-')}", content.get(key), remedy))
    for key, value in content.items():
        name = str(key).replace("_", "-")
        spec, option = names.get(name, (None, f"--{name}"))
        flag = spec.dest if spec is not None else name
        if flag in seen:
            remedy = f"the same flag as {seen[flag]!r} in {path}; leave one out"
            problems.append(Problem(option, value, remedy))
        seen[flag] = str(key)
        if name in NOT_IN_A_FILE:
            problems.append(Problem(option, value, f"has no place in a file ({path})"))
            continue
        try:
            arguments += _arguments(spec, option, value)
        except (TypeError, ValueError) as error:
            problems.append(Problem(option, value, f"{error} (in {path})"))
    return arguments, problems


def _load(path: str) -> tuple[Mapping[Any, Any], list[str]]:
    """The mapping, and the keys that stand in it more than once: YAML takes the last of them."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("--config", path, f"cannot be read: {error}")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem("--config", path, f"is not YAML: {error}")]) from error
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        remedy = "must hold a mapping of flag names to values, such as 'lr: 1e-6'"
        raise ConfigError([Problem("--config", path, remedy)])
    assert isinstance(node, yaml.MappingNode)
    counts = Counter(str(key.value) for key, _ in node.value)
    return content, [key for key, count in counts.items() if count > 1]


def _arguments(spec: FlagSpec | None, option: str, value: object) -> list[str]:
    if value is None:
        return []
    if spec is None:
        return _foreign_arguments(option, value)
    if spec.off is not None:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return [option if value else _opposite(spec, option)]
    if is_tuple(spec.annotation):
        if isinstance(value, dict):
            raise ValueError("takes a list, not a mapping")
        items = value if isinstance(value, list) else [value]
        return [f"{option}={ITEM_SEPARATOR.join(map(_scalar, items))}"] if items else []
    if isinstance(value, dict) and takes_object(spec.annotation):
        return [f"{option}={json.dumps(value)}"]
    return [f"{option}={_scalar(value)}"]


def _opposite(spec: FlagSpec, option: str) -> str:
    return next(other for other in spec.options if other != option)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        raise ValueError("takes a value, not true or false; quote a text such as 'on'")
    if isinstance(value, dict | list):
        kind = "list" if isinstance(value, list) else "mapping"
        raise ValueError(f"takes one value, not a {kind}")
    return str(value)


def _foreign_arguments(option: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={json.dumps(value) if isinstance(value, dict) else value}"]
