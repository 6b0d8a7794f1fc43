"""Errors that a user can act on."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 400
"""Characters of a value in a message; the rest would hide what is said of it."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a command line: which flag, its value, and what to do."""

    flag: str
    """The flag, with its dashes; several separated by a comma."""
    value: object
    """Of a switch whether that flag is on; empty where the flag has none, or lacks it."""
    remedy: str

    def __str__(self) -> str:
        value = f" = {_shown(self.value)}" if self.value != "" else ""
        return f"{self.flag}{value}: {self.remedy}"


def _shown(value: object) -> str:
    """As a user thinks of it: a switch is on or off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and any(isinstance(part, bool) for part in value):
        return f"({', '.join(map(_shown, value))})"
    shown = repr(value)
    if len(shown) <= MAX_SHOWN:
        return shown
    return f"{shown[:MAX_SHOWN]}... ({len(shown)} characters)"


class ConfigError(ValueError):
    """A command line, file or directory that cannot be used. Lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"  {p}" for p in self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
