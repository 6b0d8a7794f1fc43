"""Records the groups of a rollout and reads them back exactly.

``--save-debug-rollout-data`` and ``--load-debug-rollout-data`` name a file for each rollout
(``{rollout_id}`` is filled in); its content is msgpack.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.types import Group
from miles.core.places import reason_against_reading
from miles.rollout.sample_codec import groups_from_plain, groups_to_plain

FORMAT = "miles rollout 1"


def check(config: MilesConfig) -> list[Problem]:
    """What is wrong with the two flags."""
    observability = config.observability
    problems = list[Problem]()
    for flag, template in (
        ("--save-debug-rollout-data", observability.save_debug_rollout_data),
        ("--load-debug-rollout-data", observability.load_debug_rollout_data),
    ):
        if template is not None and "{rollout_id}" not in template:
            problems.append(Problem(flag, template, "put {rollout_id} in it: one file a rollout"))
    return problems


def check_record(template: str, rollout_id: int) -> list[Problem]:
    """What is wrong with the file of a rollout, as far as its first bytes show."""
    path = path_of(template, rollout_id)
    fault = _fault_of_file(path)
    return [] if fault is None else [_unusable(path, fault)]


def save_groups(template: str, rollout_id: int, groups: Sequence[Group]) -> Path:
    """Write the rollout's file, complete or not at all; return its path."""
    path = path_of(template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "rollout_id": rollout_id, "groups": groups_to_plain(groups)}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(msgspec.msgpack.encode(content))
    unfinished.replace(path)
    return path


def load_groups(template: str, rollout_id: int) -> list[Group]:
    """Read a recorded rollout. Raises ``ConfigError`` when the file is missing or is not one."""
    path = path_of(template, rollout_id)
    fault = _fault_of_file(path)
    if fault is not None:
        raise ConfigError([_unusable(path, fault)])
    try:
        content: Any = msgspec.msgpack.decode(path.read_bytes())
        return groups_from_plain(content["groups"])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise ConfigError([_unusable(path, f"a damaged record ({error})")]) from error


def path_of(template: str, rollout_id: int) -> Path:
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def _fault_of_file(path: Path) -> str | None:
    """Why the file is no recorded rollout: it is missing, or does not begin with the format."""
    reason = reason_against_reading(path)
    if reason is not None:
        return reason
    if not path.is_file():
        return "there is no such file; record this rollout first"
    start = msgspec.msgpack.encode({"format": FORMAT})[1:]
    with path.open("rb") as file:
        # The byte in front is the number of keys.
        head = file.read(1 + len(start))
    return None if head[1:] == start else f"not a recorded rollout of the format {FORMAT!r}"


def _unusable(path: Path, remedy: str) -> Problem:
    return Problem("--load-debug-rollout-data", str(path), remedy)
