"""Dataclass fields to argparse and back: the only code that touches argparse actions."""

from dataclasses import dataclass

from typing_extensions import Doc

__all__ = ["Doc", "Flag"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How a field appears on the command line, where that is not the rule."""

    name: str | None = None
    """Explicit flag; for a boolean that defaults to true, the flag that switches it off."""
    shared: bool = False
    """Megatron declares an option of the same name; in its runs that declaration is used."""
