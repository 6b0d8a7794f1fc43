"""The Megatron backend's side of the command line: what it derives, demands and refuses.

Megatron owns the parser of its runs (``namespace.py``): its options stay out of the frozen config,
which carries them as ``megatron_argv``.
"""

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from miles.backends.megatron_utils import (
    applies,
    architecture,
    derive,
    machine,
    namespace,
    package,
    refusals,
    rules,
)
from miles.config.command_line import Foreign, unknown_flag
from miles.config.errors import ConfigError, Problem
from miles.config.foreign_parser import ArgumentError, fault_of, words_of
from miles.config.lora_flags import is_lora_flag
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.messages import Message, note
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.core import hf, logging

log = logging.get(__name__)

Checked = tuple[tuple[str, ...], list[Problem], list[Message]]
"""``megatron_argv``, everything wrong, and what was derived or is worth a warning."""


def check(config: MilesConfig, foreign: Sequence[Foreign]) -> Checked:
    """Turn the flags that are not ours into Megatron's arguments, and check these.

    Imports Megatron, so takes seconds; with Megatron missing or of another version that is the
    problem, beside flags that no version has. A run that does not train needs no Megatron.
    """
    missing = package.problem()
    trains = not config.observability.debug_rollout_only
    if missing is not None or not trains:
        known = {f"--{name}": refusals.reason_against(name, "") for name in MEGATRON_FLAGS}
        problems = [missing] if missing is not None and trains else []
        return (), [*problems, *_misplaced(foreign, known)], []
    with warnings.catch_warnings():
        # Its modules say on import which kernels they miss; ``machine.py`` says it in one line.
        warnings.simplefilter("ignore")
        parser = namespace.make_parser()
    known = refusals.reasons(parser)
    problems = _misplaced(foreign, known)
    own = [flag for flag in foreign if flag.name in known and known[flag.name] is None]
    unreadable = _unreadable(parser, own)
    broken = {problem.flag for problem in unreadable}
    readable = [flag for flag in own if flag.name not in broken]
    argv, more, messages = _check_values(config, parser, readable, broken)
    return argv, [*problems, *unreadable, *more], messages


def parse(config: MilesConfig) -> argparse.Namespace:
    """Megatron's validated namespace in a trainer process (RANK and WORLD_SIZE are set).

    Raises ``ConfigError`` for what Megatron refuses on this machine.
    """
    missing = package.problem()
    if missing is not None:
        raise ConfigError([missing])
    flags = machine.flags()
    if flags:
        log.info("%s: %s", machine.reason(), " ".join(flags))
    if "--moe-grouped-gemm" in config.megatron_argv and not package.has_transformer_engine():
        log.info("--moe-grouped-gemm: needs Transformer Engine; experts run one after another")
    # How kernels overlap depends on it; Megatron demands it of GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        args = namespace.parse_args([*flags, *config.megatron_argv])
        namespace.validate(args, config, in_trainer=True)
    except ArgumentError as error:
        raise ConfigError([_refused_by_megatron(error)]) from error
    return args


def described(config: MilesConfig) -> argparse.Namespace:
    """Megatron's validated namespace of a config that passed its checks, outside a trainer.

    Raises ``ConfigError``.
    """
    try:
        return _validate(config, config.megatron_argv)
    except ArgumentError as error:
        raise ConfigError([_refused_by_megatron(error)]) from error


def help_text() -> str:
    """Megatron's flags that a run of Miles takes. Raises ``ConfigError`` without Megatron."""
    missing = package.problem()
    if missing is not None:
        raise ConfigError([missing])
    return namespace.help_text()


@dataclass(frozen=True)
class _Model:
    """What ``config.json`` of --hf-checkpoint says."""

    hf_config: Any
    flags: Mapping[str, str | bool]


def _check_values(
    config: MilesConfig,
    parser: argparse.ArgumentParser,
    own: Sequence[Foreign],
    broken: Set[str],
) -> Checked:
    """``broken`` options have their problem; that another value stands in is not one more."""
    given = {flag.name.removeprefix("--") for flag in own}
    spec = next((flag.words for flag in own if flag.name == "--spec"), None)
    model, problems = _model(config, spec)
    if (
        model is None
        or min(config.cluster.num_train_ranks, config.cluster.context_parallel_size) < 1
    ):
        # Our own rules have the problem of the latter, and no other number makes sense with it.
        return (), problems, []
    in_part = any(option.removeprefix("--") in architecture.ARCHITECTURE_FLAGS for option in broken)
    derived, notes = _architecture(config, model, given, in_part=in_part)
    demanded = derive.from_flags(given)
    known = [
        *derive.defaults(config),
        *demanded,
        *derive.from_model(config, model.hf_config, model.flags, given),
    ]
    typed = [word for flag in own for word in words_of(flag, flag.name)]
    argv = [*known, *derived, *typed]
    of_the_model = architecture.to_argv(model.flags)
    # Rules are about the model, not about the defaults of flags that a description of it lacks.
    args = parser.parse_args([*machine.flags(), *known, *of_the_model, *typed])
    namespaces = architecture.Namespaces(
        own=parser.parse_args([*machine.flags(), *argv]),
        filled=args,
        checkpoint=parser.parse_args(of_the_model),
    )
    without_effect = applies.check(args, config, own)
    described = given - {problem.flag.removeprefix("--") for problem in without_effect}
    problems = [
        *architecture.compare(namespaces, described),
        *rules.check(args, config),
        *without_effect,
        *_unusable_spec(args.spec),
    ]
    problems = [p for p in problems if broken.isdisjoint(p.flag.split(", "))]
    if not problems and not broken:
        problems = _validated(config, argv)
    notes += [note(f"--optimizer-cpu-offload takes {flag}, which is added") for flag in demanded]
    return tuple(argv), problems, [*notes, *rules.warnings(args)]


def _architecture(
    config: MilesConfig, model: _Model, given: Set[str], *, in_part: bool
) -> tuple[list[str], list[Message]]:
    """The flags of the checkpoint where the user gives none, or has only part of them read; and
    what to say about it."""
    if given & architecture.ARCHITECTURE_FLAGS and not in_part:
        names = {"spec"} - given
    else:
        names = model.flags.keys() - given
    flags = {name: value for name, value in model.flags.items() if name in names}
    if not flags:
        return [], []
    argv = architecture.to_argv(flags)
    source = f"{config.rollout.hf_checkpoint}/config.json"
    return argv, [note(f"Megatron's architecture flags from {source}: {' '.join(argv)}")]


def _unusable_spec(spec: Sequence[str] | None) -> list[Problem]:
    """What is wrong with --spec, as far as an import shows it."""
    if spec is None:
        return []
    from miles.backends.megatron_utils import specs

    try:
        specs.find_spec(spec)
    except ConfigError as error:
        return list(error.problems)
    return []


def _validated(config: MilesConfig, argv: Sequence[str]) -> list[Problem]:
    """What Megatron itself has against the arguments: the first such thing."""
    try:
        _validate(config, argv)
    except ArgumentError as error:
        return [_refused_by_megatron(error)]
    return []


def _validate(config: MilesConfig, argv: Sequence[str]) -> argparse.Namespace:
    args = namespace.parse_args([*machine.flags(), *argv])
    args.rank, args.world_size = 0, config.cluster.num_train_ranks
    namespace.validate(args, config, in_trainer=False)
    return args


def _model(config: MilesConfig, spec: Sequence[str] | None) -> tuple[_Model | None, list[Problem]]:
    """``None`` without problems where the directory itself is at fault, which has its own rule."""
    # It imports torch, which --help and other backends' command lines do without.
    from miles.backends.megatron_utils import bridge

    path = config.rollout.hf_checkpoint
    if path is None:
        return None, []
    try:
        # Its weights are not needed here.
        hf.check_config(path)
    except hf.CheckpointDirError:
        return None, []
    try:
        hf_config = hf.load_config(path)
        return _Model(hf_config, bridge.flags_of(hf_config, spec)), []
    except bridge.BridgeError as error:
        return None, [Problem("--spec", " ".join(spec or ()), str(error))]
    except (OSError, ValueError) as error:
        return None, [problem(config, "hf_checkpoint", remedy=str(error))]


def _misplaced(foreign: Sequence[Foreign], known: Mapping[str, str | None]) -> list[Problem]:
    """Flags that nobody knows or that Miles refuses, which ``known`` has the reason for."""
    hints = [option for option, reason in known.items() if reason is None]
    problems: list[Problem] = []
    for flag in foreign:
        if is_lora_flag(flag.name):
            remedy = "LoRA is not supported in this version, which trains all weights; leave it out"
            problems.append(Problem(flag.name, flag.value, remedy))
        elif flag.name not in known:
            problems.append(unknown_flag(flag, hints))
        elif reason := known[flag.name]:
            problems.append(Problem(flag.name, flag.value, f"leave it out: {reason}"))
    return problems


def _unreadable(parser: argparse.ArgumentParser, own: Sequence[Foreign]) -> list[Problem]:
    problems: list[Problem] = []
    for flag in own:
        fault = fault_of(parser, words_of(flag, flag.name))
        if fault is not None:
            problems.append(Problem(flag.name, flag.value, fault))
    return problems


def _refused_by_megatron(error: ArgumentError) -> Problem:
    return Problem("--train-backend", "megatron", f"Megatron refuses its arguments: {error}")
