"""Errors that a user can act on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a command line: which flag, its value, and what to do."""

    flag: str
    """The flag, with its dashes; several separated by a comma."""
    value: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.flag} = {self.value!r}: {self.remedy}"


class ConfigError(ValueError):
    """A command line, file or directory that cannot be used. Lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"  {p}" for p in self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
