"""How a rule names flags and values in a ``Problem``."""

from collections.abc import Callable
from typing import Any

from miles.config.errors import Problem
from miles.config.flags import flag_specs, group_types
from miles.config.root import MilesConfig

Given = frozenset[str]
"""Fields that the command line or a YAML file names, whatever their value."""

Check = Callable[[MilesConfig, Given], list[Problem]]
"""One constraint: what is wrong, or an empty list."""


def flag_name(dest: str) -> str:
    """The flag of a field as a user types it."""
    return _NAMES[dest]


def option_name(dest: str) -> str:
    """The option that sets a field: for a switch the one that puts it on."""
    return _OPTIONS[dest]


def values_of(config: MilesConfig) -> dict[str, Any]:
    """Every field of every group by its name; names are unique over the groups."""
    groups = config.to_dict()
    return {
        dest: value for group in group_types(MilesConfig) for dest, value in groups[group].items()
    }


def problem(config: MilesConfig, *dests: str, remedy: str) -> Problem:
    """A problem of one or several fields, with their values; of a flag that switches its field
    off, whether the flag is on."""
    values = values_of(config)
    found = [not values[dest] if dest in _SWITCHED_OFF else values[dest] for dest in dests]
    return Problem(
        ", ".join(flag_name(dest) for dest in dests),
        found[0] if len(found) == 1 else tuple(found),
        remedy,
    )


_NAMES = {spec.dest: spec.name for spec in flag_specs(MilesConfig)}
_SWITCHED_OFF = {spec.dest for spec in flag_specs(MilesConfig) if spec.name == spec.off}
_OPTIONS = {spec.dest: spec.on for spec in flag_specs(MilesConfig)}
