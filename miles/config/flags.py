"""Dataclass fields to argparse and back: the only code that touches argparse actions.

Hand-written because Megatron owns the parser of its runs and calls our provider on it, which no
library for dataclass command lines allows.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from typing_extensions import Doc

from miles.config.errors import Problem
from miles.config.values import (
    Invalid,
    base_type,
    convert,
    convert_items,
    is_switch,
    is_tuple,
    literal_choices,
)

__all__ = ["UNSET", "Doc", "Flag", "FlagSpec", "add_arguments", "flag_specs", "read_namespace"]

UNSET = object()
"""In a namespace: the flag was not given."""

AddArgument = Callable[..., argparse.Action]
"""``add_argument`` of a parser or of one of its groups."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How a field appears on the command line, where that is not the rule."""

    name: str | None = None
    """Explicit flag; for a boolean that defaults to true, the flag that switches it off."""
    shared: bool = False
    """Megatron declares an option of the same name; in its runs that declaration is used."""


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """One field of one group as a flag."""

    group: str
    """Field of the root config that holds the group."""
    dest: str
    annotation: Any
    """Type of the field, without ``Annotated``."""
    default: Any
    doc: str
    shared: bool
    on: str
    """The option that sets it."""
    off: str | None
    """For a switch, its opposite: what lets a command line overrule a YAML file."""

    @property
    def name(self) -> str:
        """The option that a user needs: the one that changes the default."""
        return self.off if self.off is not None and self.default is True else self.on

    @property
    def options(self) -> tuple[str, ...]:
        return (self.on,) if self.off is None else (self.on, self.off)

    @property
    def metavar(self) -> str:
        """The type as help and documentation show it; empty for a switch."""
        item = get_args(self.annotation)[0] if is_tuple(self.annotation) else self.annotation
        choices = literal_choices(item)
        if choices:
            return "{" + ",".join(choices) + "}"
        if is_switch(item):
            return ""
        base = base_type(item)
        return {str: "TEXT", int: "INT", float: "FLOAT"}.get(base, "JSON")

    @property
    def help(self) -> str:
        """What the option ``name`` does."""
        return f"Switch off: {self.doc}" if self.name == self.off else self.doc

    @property
    def default_text(self) -> str:
        """The default as a user would type it; empty where there is none."""
        if self.default is None or self.default in ((), {}):
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default))
        return json.dumps(self.default) if isinstance(self.default, dict) else str(self.default)


@cache
def flag_specs(config_type: type) -> tuple[FlagSpec, ...]:
    """Every flag of a root config, group by group in the order of declaration."""
    specs: list[FlagSpec] = []
    for group, group_type in group_types(config_type).items():
        hints = get_type_hints(group_type, include_extras=True)
        specs += [
            _spec(group, field, hints[field.name]) for field in dataclasses.fields(group_type)
        ]
    dests = [spec.dest for spec in specs]
    assert len(dests) == len(set(dests)), "two groups declare the same flag"
    return tuple(specs)


def group_types(config_type: type) -> dict[str, Any]:
    """The groups of flags by their field; other fields of a root config are no flags."""
    hints = get_type_hints(config_type)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def group_heading(group_type: type) -> tuple[str, str]:
    """Title and description of a group: its docstring, split at the colon."""
    title, _, description = (group_type.__doc__ or "").partition(": ")
    return title, description


def add_arguments(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Declare every flag of ``config_type``, in one argument group for each of its groups.

    Where the parser has a shared option already (Megatron's), only our default is set on it.
    """
    specs = flag_specs(config_type)
    for group, group_type in group_types(config_type).items():
        section = parser.add_argument_group(*group_heading(group_type))
        for spec in specs:
            if spec.group == group:
                _declare(parser, section.add_argument, spec)


def read_namespace(namespace: argparse.Namespace, config_type: type) -> tuple[Any, list[Problem]]:
    """The frozen config of a parsed command line, and a problem for each unreadable value.

    A flag that is ``UNSET`` or unreadable has its default.
    """
    raw = vars(namespace)
    problems: list[Problem] = []
    groups: dict[str, dict[str, Any]] = {group: {} for group in group_types(config_type)}
    for spec in flag_specs(config_type):
        value = raw[spec.dest]
        if isinstance(value, float) and not math.isfinite(value):
            value = Invalid(value, "must be a finite number")
        if isinstance(value, Invalid):
            problems.append(Problem(spec.name, value.value, value.remedy))
        elif value is not UNSET:
            groups[spec.group][spec.dest] = value
    types = group_types(config_type)
    return config_type(**{group: types[group](**groups[group]) for group in types}), problems


def _spec(group: str, field: "dataclasses.Field[Any]", hint: Any) -> FlagSpec:
    metadata = hint.__metadata__
    doc = next(part for part in metadata if isinstance(part, Doc))
    flag = next((part for part in metadata if isinstance(part, Flag)), Flag())
    annotation = hint.__origin__
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    kebab = field.name.replace("_", "-")
    switch = is_switch(annotation)
    on = f"--{kebab}" if switch or flag.name is None else flag.name
    opposite = flag.name or (f"--{kebab[3:]}" if kebab.startswith("no-") else f"--no-{kebab}")
    return FlagSpec(
        group=group,
        dest=field.name,
        annotation=annotation,
        default=default,
        doc=doc.documentation,
        shared=flag.shared,
        on=on,
        off=opposite if switch else None,
    )


def _declare(parser: argparse.ArgumentParser, add: AddArgument, spec: FlagSpec) -> None:
    existing = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    new = [option for option in spec.options if option not in existing]
    assert spec.shared or len(new) == len(spec.options), f"{spec.name} is declared twice"
    if spec.off is None:
        if new:
            _declare_value(add, spec)
    else:
        for option in new:
            _declare_switch(add, spec, option)
    parser.set_defaults(**{spec.dest: spec.default})


def _declare_switch(add: AddArgument, spec: FlagSpec, option: str) -> None:
    on = option == spec.on
    shown = option == spec.name or spec.default is None
    text = spec.help if option == spec.name else f"The opposite of {spec.on}."
    add(
        option,
        dest=spec.dest,
        action="store_const",
        const=on,
        help=_help(text, "") if shown else argparse.SUPPRESS,
    )


def _declare_value(add: AddArgument, spec: FlagSpec) -> None:
    text = _help(spec.doc, spec.default_text)
    if is_tuple(spec.annotation):
        action = add(
            spec.on, dest=spec.dest, action=_StoreItems, nargs="+", metavar=spec.metavar, help=text
        )
        assert isinstance(action, _StoreItems)
        action.annotation = spec.annotation
        return
    add(
        spec.on,
        dest=spec.dest,
        type=lambda value: convert(spec.annotation, value),
        metavar=spec.metavar,
        help=text,
    )


def _help(doc: str, default: str) -> str:
    text = f"{doc} [{default}]" if default else doc
    return text.replace("%", "%%")


class _StoreItems(argparse.Action):
    """Stores a tuple; ``type=`` cannot, because it sees one argument at a time."""

    annotation: Any = tuple[str, ...]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert values is not None
        setattr(namespace, self.dest, convert_items(self.annotation, list(values)))
