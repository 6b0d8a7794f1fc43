"""Rows of prompt data: ``.jsonl`` or ``.parquet`` files, or a reasoning-gym family, and slices.

A file that has any row which is not a JSON object is refused with the list of those rows: a row
that is left out in silence is training data that nobody misses.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles.config.data import DataConfig
from miles.config.errors import ConfigError, Problem
from miles.core import logging
from miles.core.places import reason_against_reading
from miles.rollout import gym

log = logging.get(__name__)

GYM_PREFIX = "reasoning_gym:"
MAX_LISTED = 20
"""Bad rows that an error spells out; of the others it says how many there are."""


@dataclass(frozen=True)
class RowKeys:
    """Which key of a row holds what; ``label`` is ``None`` when rows have none."""

    input: str
    label: str | None
    metadata: str
    tools: str


GYM_KEYS = RowKeys("question", "answer", "metadata", "tools")

_BOM = b"\xef\xbb\xbf"
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


@dataclass(frozen=True)
class Row:
    """One row and where it is from, such as ``line 3`` (counted from 1)."""

    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    where: str
    remedy: str


@dataclass(frozen=True)
class DataSpec:
    """A value of ``--prompt-data`` taken apart."""

    path: str
    rows: slice
    family: str | None
    """The reasoning-gym family; ``None`` for a file."""


def parse_spec(spec: str) -> DataSpec:
    """Take ``path@[a:b]`` apart. Raises ``ValueError`` for a slice that is not one."""
    path, rows = spec, slice(None)
    match = _SLICE.match(spec)
    if match:
        start, stop = match["start"], match["stop"]
        if "-" in (start, stop):
            raise ValueError("a slice is file@[a:b] with whole numbers, each optional")
        rows = slice(int(start) if start else None, int(stop) if stop else None)
        path = match["path"]
    elif "@[" in spec:
        raise ValueError("a slice is file@[a:b] with whole numbers, each optional")
    family = path.removeprefix(GYM_PREFIX) if path.startswith(GYM_PREFIX) else None
    return DataSpec(path, rows, family)


def check_spec(flag: str, spec: str) -> list[Problem]:
    """What can be said of prompt data without reading it."""
    try:
        parsed = parse_spec(spec)
    except ValueError as error:
        return [Problem(flag, spec, str(error))]
    if parsed.family is not None:
        unknown = gym.unknown_family(parsed.family)
        return [] if unknown is None else [Problem(flag, spec, unknown)]
    path = Path(parsed.path)
    if path.suffix not in READERS:
        kinds = " or ".join(READERS)
        remedy = f"give a file that ends in {kinds}, or problems as {GYM_PREFIX}FAMILY"
        return [Problem(flag, spec, remedy)]
    reason = reason_against_reading(path)
    if reason is not None:
        return [Problem(flag, spec, reason)]
    if not path.is_file():
        return [Problem(flag, spec, "there is no such file")]
    return []


def read_rows(flag: str, spec: str, data: DataConfig) -> tuple[list[Row | BadRow], RowKeys]:
    """The rows that the slice keeps, and the keys of their values.

    Raises ``ConfigError`` when there is none, or none that has the key of the input or label.
    """
    problems = check_spec(flag, spec)
    if problems:
        raise ConfigError(problems)
    parsed = parse_spec(spec)
    if parsed.family is not None:
        entries = gym.make_entries(parsed.family, data)
        rows = list[Row | BadRow](Row(f"problem {i}", entry) for i, entry in enumerate(entries))
        keys = GYM_KEYS
    else:
        path = Path(parsed.path)
        rows = READERS[path.suffix](path)
        keys = RowKeys(data.input_key, data.label_key, data.metadata_key, data.tool_key)
    kept = rows[parsed.rows]
    if not kept:
        raise ConfigError(
            [Problem(flag, spec, f"no row is left of {len(rows)}; give rows, or another slice")]
        )
    unknown = _unknown_keys(flag, spec, kept, keys)
    if unknown:
        unreadable = [row for row in kept if isinstance(row, BadRow)]
        raise ConfigError([*unknown, *_bad_rows(flag, spec, unreadable)])
    return kept, keys


def refuse_bad_rows(flag: str, spec: str, bad: Sequence[BadRow]) -> None:
    """Raise ``ConfigError`` that lists the rows, if there are any."""
    problems = _bad_rows(flag, spec, bad)
    if problems:
        raise ConfigError(problems)


def _unknown_keys(
    flag: str, spec: str, rows: Sequence[Row | BadRow], keys: RowKeys
) -> list[Problem]:
    """A key that no row has is one slip on the command line, not one in each row."""
    found = [row.values for row in rows if isinstance(row, Row)]
    if not found:
        return []
    named = {"--input-key": keys.input, "--label-key": keys.label}
    if flag == "--eval-prompt-data":
        named = {"--eval-input-key": keys.input, "--eval-label-key": keys.label}
    have = ", ".join(sorted(found[0]))
    return [
        Problem(option, key, f"no row of {flag} {spec} has this key; the first has {have}")
        for option, key in named.items()
        if key is not None and not any(key in values for values in found)
    ]


def _bad_rows(flag: str, spec: str, bad: Sequence[BadRow]) -> list[Problem]:
    if not bad:
        return []
    lines = [f"{row.where}: {row.remedy}" for row in bad[:MAX_LISTED]]
    if len(bad) > MAX_LISTED:
        lines.append(f"and {len(bad) - MAX_LISTED} more")
    head = f"{len(bad)} row{'s' if len(bad) > 1 else ''} cannot be used:"
    return [Problem(flag, spec, "\n    ".join([head, *lines]))]


def _read_jsonl(path: Path) -> list[Row | BadRow]:
    try:
        content = path.read_bytes()
    except OSError as error:
        return [BadRow("the file", f"cannot be read ({error}); copy it to where it can")]
    if content.startswith(_BOM):
        log.info("%s: the byte order mark in front of line 1 is not part of the data", path)
        content = content[len(_BOM) :]
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return [_parse_line(f"line {number}", line) for number, line in enumerate(lines, 1)]


def _parse_line(where: str, line: bytes) -> Row | BadRow:
    if not line.strip():
        return BadRow(where, "blank; remove the line")
    if line.startswith(_BOM):
        return BadRow(where, "a byte order mark inside the file; remove it")
    try:
        values = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(where, f"not JSON ({error}); write one object a line")
    if not isinstance(values, dict):
        return BadRow(where, f"{type(values).__name__} instead of an object; write {{...}}")
    return Row(where, values)


def _read_parquet(path: Path) -> list[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        return [BadRow("the file", f"not a readable parquet file ({error}); write it again")]
    return [Row(f"row {number}", values) for number, values in enumerate(rows, 1)]


READERS: dict[str, Callable[[Path], list[Row | BadRow]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
