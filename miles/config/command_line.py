"""Arguments and ``--config`` file to one namespace; every problem is collected, none stops it."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from miles.config.errors import ConfigError, Problem
from miles.config.flags import UNSET, FlagSpec, add_arguments, flag_specs, read_namespace
from miles.config.root import MilesConfig
from miles.config.synonyms import SYNONYMS
from miles.config.values import ITEM_SEPARATOR, Invalid, did_you_mean, is_tuple
from miles.config.yaml_file import read_arguments


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """An argument that is none of our flags: another backend's, or a slip of the pen."""

    name: str
    words: tuple[str, ...] = ()
    """Its values, as they were separated."""
    file: str | None = None
    """The YAML file that it stands in; ``None``: the command line."""

    @property
    def value(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What was asked for, before derivations and checks."""

    config: MilesConfig
    given: frozenset[str]
    """Fields that the command line or the file names, whatever their value."""
    foreign: tuple[Foreign, ...]
    problems: tuple[Problem, ...]
    whole: bool
    """False where the file could not be read: what it says is missing here."""


_HELP = ("-h", "--help", "--help-megatron", "--help-sglang", "--help-router")


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``train.py``: our flags in their groups, and ``--config``."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--config FILE.yaml] --FLAG VALUE ...",
        description="Train a language model by reinforcement. A run needs --hf-checkpoint, "
        "--prompt-data, --rm-type (or --custom-rm-path), --num-rollout (or --num-epoch), "
        "--rollout-batch-size, --rollout-max-response-len, and GPUs for the engines: "
        "--rollout-num-gpus, or --colocate to share the trainer's. Rewards are compared within the "
        "responses to one prompt, so most runs also raise --n-samples-per-prompt from 1. "
        "docs/configuration.md describes all flags.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=None,
        help="A YAML file of flags; the command line overrules it, it overrules the defaults.",
    )
    parser.add_argument(
        "--help-megatron",
        action="store_true",
        help="List the flags of Megatron's that --train-backend megatron takes too, and exit.",
    )
    parser.add_argument(
        "--help-sglang",
        action="store_true",
        help="List the flags of SGLang's server, each under --sglang-, and exit.",
    )
    parser.add_argument(
        "--help-router",
        action="store_true",
        help="List the flags of SGLang's router, each under --router-, and exit.",
    )
    add_arguments(parser, MilesConfig)
    return parser


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse arguments. ``--help`` prints and exits."""
    parser = make_parser()
    specs = flag_specs(MilesConfig)
    namespace = _unset_namespace(specs)
    foreign: list[Foreign] = []
    file_problems: list[Problem] = []
    whole = True
    path = _parse(parser, argv, _unset_namespace(specs), None)[0].config
    if path is not None:
        try:
            arguments, file_problems = read_arguments(path, specs)
        except ConfigError as error:
            arguments, file_problems, whole = [], list(error.problems), False
        namespace, file_foreign, problems = _parse(parser, arguments, namespace, path)
        foreign += file_foreign
        file_problems += problems
    namespace, argv_foreign, problems = _parse(parser, argv, namespace, None)
    config, value_problems = read_namespace(namespace, MilesConfig)
    given = frozenset(s.dest for s in specs if vars(namespace)[s.dest] is not UNSET)
    return CommandLine(
        config=config,
        given=given,
        foreign=(*foreign, *argv_foreign),
        problems=(*file_problems, *problems, *value_problems),
        whole=whole,
    )


def unknown_flag(foreign: Foreign, others: Iterable[str] = ()) -> Problem:
    """The problem of a flag that nobody knows, with the nearest flags that exist: ours, and those
    of ``others`` (with their dashes)."""
    if not foreign.name.startswith("-"):
        remedy = "belongs to no flag; put quotes around a text with spaces"
        return Problem(foreign.name, foreign.value, remedy)
    known = [option for spec in flag_specs(MilesConfig) for option in spec.options]
    where = f" in {foreign.file}" if foreign.file is not None else ""
    names = list(dict.fromkeys([*known, "--config", *others]))
    hint = did_you_mean(foreign.name.replace("_", "-"), names, SYNONYMS)
    return Problem(foreign.name, foreign.value, f"unknown flag{where}; {hint or 'see --help'}")


def _unset_namespace(specs: Sequence[FlagSpec]) -> argparse.Namespace:
    """argparse gives a default only to what the namespace lacks: so the flags given show."""
    return argparse.Namespace(**{spec.dest: UNSET for spec in specs})


def _parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    namespace: argparse.Namespace,
    file: str | None,
) -> tuple[argparse.Namespace, list[Foreign], list[Problem]]:
    arguments, problems = _digestible(argv)
    namespace, extras = parser.parse_known_args(arguments, namespace)
    if file is not None:
        for name, value in vars(namespace).items():
            if isinstance(value, Invalid):
                setattr(namespace, name, Invalid(value.value, f"{value.remedy} (in {file})"))
    return namespace, _foreign(extras, file), problems


def _digestible(argv: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Leave out what argparse would stop at, each with its problem.

    That is a flag without its value and a switch with one. Values are joined to their flag,
    because argparse takes one such as ``-1e-5`` for an option otherwise.
    """
    specs = flag_specs(MilesConfig)
    switches = {
        option: f"takes no value; {spec.on} switches it on, {spec.off} switches it off"
        for spec in specs
        if spec.off is not None
        for option in spec.options
    }
    many = {spec.on for spec in specs if is_tuple(spec.annotation)}
    single = {spec.on for spec in specs if spec.off is None} - many | {"--config"}
    arguments: list[str] = []
    problems: list[Problem] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        option, equals, value = token.partition("=")
        if token == "--":
            problems.append(Problem(token, " ".join(rest), "is not used here; leave it out"))
        elif option in switches and (equals or (rest and not _is_option(rest[0]))):
            words = [value] if equals else _values_of(True, rest)
            problems.append(Problem(option, " ".join(words), switches[option]))
        elif option in _HELP and equals:
            problems.append(Problem(option, value, "takes no value; write it alone"))
        elif token in single | many:
            values = _values_of(token in many, rest)
            if values:
                arguments.append(f"{token}={ITEM_SEPARATOR.join(values)}")
            else:
                remedy = f"needs a value (one that begins with two dashes: {token}=VALUE)"
                problems.append(Problem(token, "", remedy))
        else:
            arguments.append(token)
    return arguments, problems


def _values_of(many: bool, rest: list[str]) -> list[str]:
    """Take from ``rest`` the values of the flag in front of it."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (many or not values):
        values.append(rest.pop(0))
    return values


def _foreign(extras: Sequence[str], file: str | None) -> list[Foreign]:
    """Unknown options, each with the words behind it; a word alone stands for itself."""
    found: list[Foreign] = []
    for token in extras:
        if found and not _is_option(token):
            last = found[-1]
            found[-1] = replace(last, words=(*last.words, token))
        else:
            name, equals, value = token.partition("=")
            found.append(Foreign(name=name, words=(value,) if equals else (), file=file))
    return found


def _is_option(token: str) -> bool:
    return token.startswith("-") and not re.match(r"-\.?\d", token)
