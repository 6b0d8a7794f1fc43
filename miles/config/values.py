"""Text to typed values: what a flag's type accepts, and what to say when it does not."""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

ITEM_SEPARATOR = "\0"
"""Joins the items of a YAML list in one argument; a real argument cannot contain it."""

MAX_DIGITS = 18
"""Of a whole number: what 64 bits hold. Python itself refuses to read some thousands."""

MAX_DEPTH = 100
"""Levels of objects and lists in a JSON value."""

_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels; make it flatter"


@dataclass(frozen=True)
class Invalid:
    """Stands in a namespace for a value that could not be read, so that parsing goes on."""

    value: object
    remedy: str


def base_type(annotation: Any) -> Any:
    """``T`` of ``T | None``, else the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def literal_choices(annotation: Any) -> tuple[str, ...]:
    """The values of a ``Literal`` (also of one that may be ``None``); empty for other types."""
    base = base_type(annotation)
    return get_args(base) if get_origin(base) is Literal else ()


def is_tuple(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def is_switch(annotation: Any) -> bool:
    return base_type(annotation) is bool


def takes_object(annotation: Any) -> bool:
    base = base_type(annotation)
    return (get_origin(base) or base) is dict


def convert(annotation: Any, text: str) -> Any:
    """The value of ``text`` as the annotated type, or ``Invalid``."""
    choices = literal_choices(annotation)
    if choices:
        return text if text in choices else Invalid(text, _choose_from(text, choices))
    base = base_type(annotation)
    return _CONVERTERS[get_origin(base) or base](text)


def convert_items(annotation: Any, texts: Sequence[str]) -> Any:
    """The values of a ``tuple[T, ...]``, or ``Invalid`` for the first bad one."""
    item_type = get_args(annotation)[0]
    items = [convert(item_type, item) for text in texts for item in text.split(ITEM_SEPARATOR)]
    return next((item for item in items if isinstance(item, Invalid)), tuple(items))


def did_you_mean(word: str, known: Sequence[str], synonyms: Mapping[str, str] | None = None) -> str:
    """``"did you mean X?"`` with the nearest known words, or an empty string.

    ``synonyms`` are further spellings -> the known word that each stands for.
    """
    synonyms = synonyms or {}
    if word in synonyms:
        return f"did you mean {synonyms[word]}?"
    # A word that is not ours is worth guessing only where little is wrong with it.
    slips = difflib.get_close_matches(word, synonyms, n=1, cutoff=0.8)
    close = [synonyms[slip] for slip in slips]
    close += difflib.get_close_matches(word, known, n=2, cutoff=0.8 if slips else 0.6)
    nearest = list(dict.fromkeys(close))[:2]
    return f"did you mean {' or '.join(nearest)}?" if nearest else ""


def _choose_from(text: str, choices: Sequence[str]) -> str:
    return f"choose from {', '.join(choices)}. {did_you_mean(text, choices)}".rstrip(" .")


def _to_text(text: str) -> str | Invalid:
    if "\0" in text:
        return Invalid(text, "must not hold a null character")
    return text if text else Invalid(text, "must not be empty; leave the flag out instead")


def _to_int(text: str) -> int | Invalid:
    if re.fullmatch(r"[+-]?\d+", text) is None:
        return Invalid(text, "must be a whole number")
    if len(text) > MAX_DIGITS:
        return Invalid(text, f"must be a whole number of at most {MAX_DIGITS} characters")
    return int(text)


def _to_float(text: str) -> float | Invalid:
    try:
        value = float(text)
    except ValueError:
        return Invalid(text, "must be a number")
    return value if math.isfinite(value) else Invalid(text, "must be a finite number")


def _to_object(text: str) -> dict[str, Any] | Invalid:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return Invalid(text, _TOO_DEEP)
    except ValueError as error:
        return Invalid(text, f"must be a JSON object in quotes such as '{{\"key\": 1}}' ({error})")
    if not isinstance(value, dict):
        return Invalid(text, "must be a JSON object ({...})")
    return Invalid(text, _TOO_DEEP) if _is_deep(value) else value


def _is_deep(value: Any) -> bool:
    """Deeper than what copies it can follow."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [v for part in inner for v in part if isinstance(v, dict | list)]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


_CONVERTERS: dict[Any, Callable[[str], Any]] = {
    str: _to_text,
    int: _to_int,
    float: _to_float,
    dict: _to_object,
}


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``HOST:PORT``, an IPv6 host in brackets; ``None`` where it is none."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        return None
    return found[1], int(found[2])
