"""Names to things that are imported when first used."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Registry[T]:
    """Maps a name to ``"module:attribute"``; a wrong name lists the right ones."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def load(self, name: str) -> T:
        """Import and return the entry. Raises ``ValueError`` for an unknown name."""
        if name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self._kind} {name!r}; there are: {known}")
        module, _, attribute = self._entries[name].partition(":")
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
        return value
