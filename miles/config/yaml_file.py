"""A YAML file of flags as arguments, so that one path reads both it and the command line."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.errors import ConfigError, Problem
from miles.config.flags import FlagSpec
from miles.config.values import ITEM_SEPARATOR, is_tuple, takes_object

ALWAYS_ON = ("use-distributed-optimizer",)
"""Switches of Megatron that Miles sets, whatever a file says."""
NOT_IN_A_FILE = ("config", "help", "help-megatron", "help-sglang", "help-router")


def read_arguments(path: str, specs: Sequence[FlagSpec]) -> tuple[list[str], list[Problem]]:
    """The arguments that a file stands for. Raises ``ConfigError`` for an unreadable file.

    Keys are flag names without the dashes in front, with ``-`` or ``_``. ``null`` leaves a flag at
    its default. A key that is no flag of ours becomes an argument too: whoever handles unknown
    arguments decides about it.
    """
    names = {option.removeprefix("--"): (spec, option) for spec in specs for option in spec.options}
    arguments: list[str] = []
    seen: dict[str, str] = {}
    content, problems = _load(path)
    for key, value in content.items():
        name = str(key).replace("_", "-")
        spec, option = names.get(name, (None, f"--{name}"))
        flag = spec.dest if spec is not None else name
        if flag in seen:
            remedy = f"the same flag as {seen[flag]!r} in {path}; leave one out"
            problems.append(Problem(option, value, remedy))
        seen[flag] = str(key)
        if name.startswith("-"):
            remedy = f"is written {name.lstrip('-')!r} in a file ({path}), without dashes in front"
            problems.append(Problem(str(key), value, remedy))
            continue
        if name in NOT_IN_A_FILE:
            problems.append(Problem(option, value, f"has no place in a file ({path})"))
            continue
        try:
            arguments += _arguments(spec, option, value)
        except (TypeError, ValueError) as error:
            problems.append(Problem(option, value, f"{error} (in {path})"))
    return arguments, problems


def _load(path: str) -> tuple[Mapping[Any, Any], list[Problem]]:
    """The mapping without the keys that have a problem, which are those whose value is not read as
    it is written, and with the last of those that stand in it more than once."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return {}, []
        if not isinstance(node, yaml.MappingNode):
            remedy = "must hold a mapping of flag names to values, such as 'lr: 1e-6'"
            raise ConfigError([Problem("--config", path, remedy)])
        pairs = [(key, value, _fault(loader, [key, value])) for key, value in node.value]
        node.value = [(key, value) for key, value, fault in pairs if fault is None]
        content = loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("--config", path, f"cannot be read: {error}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([Problem("--config", path, f"is not YAML: {error}")]) from error
    problems = [
        Problem(_flag(str(key.value)), fault.written, f"{fault.remedy} ({path}, line {fault.line})")
        for key, _, fault in pairs
        if fault is not None
    ]
    counts = Counter(str(key.value) for key, _, _ in pairs)
    problems += [
        Problem(_flag(key), content.get(key), f"stands more than once in {path}; leave one")
        for key, count in counts.items()
        if count > 1
    ]
    return content, problems


@dataclass(frozen=True)
class _Fault:
    """A value that does not mean what it looks like."""

    written: str
    remedy: str
    line: int
    """Counted from 1."""


def _fault(loader: Any, nodes: Sequence[Any]) -> _Fault | None:
    """The first such value in these nodes of a file and in all below them."""
    faults = (
        _fault_of_scalar(loader, node)
        if isinstance(node.value, str)
        else _fault(loader, [part for parts in node.value for part in _parts(parts)])
        for node in nodes
    )
    return next((fault for fault in faults if fault is not None), None)


def _parts(item: Any) -> tuple[Any, ...]:
    """A key with its value in a mapping, or one item of a list."""
    return item if isinstance(item, tuple) else (item,)


def _fault_of_scalar(loader: Any, node: Any) -> _Fault | None:
    kind, written = node.tag.rpartition(":")[2], node.value
    line = node.start_mark.line + 1
    try:
        value = loader.construct_object(node)
    except ValueError as error:
        remedy = f"is no {kind} ({error}); correct it, or put quotes around a text"
        return _Fault(written, remedy, line)
    if kind not in ("int", "float") or not _is_read_otherwise(written, value):
        return None
    remedy = f"YAML reads it as the number {value}; write a number in decimal, a text in quotes"
    return _Fault(written, remedy, line)


def _is_read_otherwise(written: str, value: float) -> bool:
    """Whether YAML 1.1 makes another number of it than a reader: base 60, or base 8."""
    digits = written.replace("_", "").lstrip("+-")
    if ":" in digits:
        return True
    return digits.isdecimal() and abs(value) != int(digits)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


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
    if value is False and option.removeprefix("--") in ALWAYS_ON:
        raise ValueError("is always on with --train-backend megatron; leave it out")
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={json.dumps(value) if isinstance(value, dict) else value}"]
