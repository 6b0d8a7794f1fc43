"""The names on docs/metrics.md."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
OF_EVERY_ROW = {"step", "time"}


@cache
def names() -> frozenset[str]:
    """Those that the tables define, in the first column; ``<...>`` stands for any text."""
    return frozenset(re.findall(r"^\| `(\w+/[^`]+)` \|", PAGE.read_text(), re.MULTILINE))


def unlisted(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names in the rows of a ``metrics.jsonl`` that the page does not have."""
    found = {name for row in rows for name in row} - OF_EVERY_ROW
    assert found, "no row has a metric"
    return {name for name in found if not any(_pattern(n).fullmatch(name) for n in names())}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = (re.escape(part) for part in re.split(r"<\w+>", name))
    return re.compile("[^/]+".join(parts))
