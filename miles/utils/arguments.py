"""Composition root of the command line: flags, derivations, and the checks of every layer.

``python -m miles.utils.arguments`` prints ``docs/configuration.md``.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles.backends.fsdp_utils import arguments as fsdp_arguments
from miles.backends.megatron_utils import arguments as megatron_arguments
from miles.backends.megatron_utils.namespace import add_miles_arguments
from miles.backends.sglang_utils import arguments as sglang_arguments
from miles.backends.sglang_utils import rules as sglang_rules
from miles.backends.training_utils.checkpoints import (
    check_load,
    first_rollout_id,
    holds_steps,
    run_directory_of,
)
from miles.backends.training_utils.export_mark import check_save_hf
from miles.config import record, rules
from miles.config.command_line import CommandLine, Foreign, read_command_line, unknown_flag
from miles.config.derived import needs_reference
from miles.config.errors import ConfigError, Problem
from miles.config.flags import flag_specs
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.messages import Message, warning
from miles.config.reference import configuration_page
from miles.config.root import MilesConfig
from miles.config.rules import machines
from miles.config.rules.problems import flag_name, problem
from miles.config.rules.ranges import RANGE_CHECKS
from miles.contracts.hook_check import check_hooks
from miles.core import hf, logging, places, wandb_account
from miles.rollout import context, debug_data, multi_turn, prompts, template_check
from miles.rollout.rewards import table as rewards

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

log = logging.get(__name__)


def parse_args(argv: Sequence[str] | None = None) -> MilesConfig:
    """The frozen config of a command line (default: this process's).

    Prints every problem and exits with code 2 when there is any.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        for flag, help_text in HELP_OF_OTHERS.items():
            if flag in argv:
                print(help_text(), end="")
                raise SystemExit(0)
        config, messages = read_config(argv)
    except ConfigError as error:
        raise refusal(error) from None
    for message in messages:
        log.log(message.level, "%s", message.text)
    return config


def refusal(error: ConfigError, program: str | None = None) -> SystemExit:
    """Print every problem; the exit to raise."""
    program = program or os.path.basename(sys.argv[0])
    count = len(error.problems)
    print(f"{program}: {count} problem{'s' if count > 1 else ''}:", file=sys.stderr)
    print(error, file=sys.stderr)
    return SystemExit(2)


def read_config(
    argv: Sequence[str], *, runs_here: bool = True
) -> tuple[MilesConfig, list[Message]]:
    """The config, and what was reconciled or derived. Raises ``ConfigError`` with every problem at
    once.

    Unless it ``runs_here``, nothing is asked of this machine's files and devices but the model's
    ``config.json``, and flags for engines of SGLang's own are not read.
    """
    line = read_command_line(argv)
    if not line.whole:
        raise ConfigError([*line.problems, *_whatever_the_file_says(line)])
    config, replaced = rules.resolve(line.config)
    for_engines = [flag for flag in line.foreign if sglang_arguments.is_ours(flag)]
    for_trainer = [flag for flag in line.foreign if not sglang_arguments.is_ours(flag)]
    megatron_argv, problems, more = _check_backend(config, line.given, for_trainer)
    if runs_here:
        engine = sglang_arguments.check(config, line.given, for_engines)
        own = check_all(config, line.given)
    else:
        engine = sglang_arguments.Checked(messages=_unread(for_engines))
        own = check_description(config, line.given)
    found = [*problems, *engine.problems, *own]
    problems = _without_consequences(found, line)
    if problems:
        raise ConfigError(problems)
    config = replace(
        config,
        megatron_argv=megatron_argv,
        sglang_argv=engine.sglang_argv,
        router_argv=engine.router_argv,
    )
    first = [*map(warning, replaced), *engine.messages, *rules.notes(config)]
    return config, [*first, *more]


def _unread(flags: Sequence[Foreign]) -> list[Message]:
    names = ", ".join(dict.fromkeys(flag.name for flag in flags))
    return [warning(f"flags of SGLang's own, which nothing here reads: {names}")] if names else []


def _whatever_the_file_says(line: CommandLine) -> list[Problem]:
    """What is wrong with the command line alone, where the file beside it cannot be read: numbers
    and places that it names, and flags that nobody knows."""
    config, given = line.config, line.given
    found = [p for rule in RANGE_CHECKS for p in rule(config, given)] + check_places(config)
    named = {flag_name(dest) for dest in given}
    unknown = [
        unknown_flag(flag)
        for flag in line.foreign
        if not sglang_arguments.is_ours(flag) and flag.name.removeprefix("--") not in MEGATRON_FLAGS
    ]
    return [*(p for p in found if p.flag in named), *unknown]


def check_all(config: MilesConfig, given: frozenset[str]) -> list[Problem]:
    """Everything wrong with a resolved config but what its backend finds: rules, engine, files,
    user code."""
    problems = [*rules.check(config, given), *sglang_rules.check(config)]
    for check in OUTSIDE_CHECKS:
        problems += check(config)
    return problems


def check_description(config: MilesConfig, given: frozenset[str]) -> list[Problem]:
    """What is wrong with a resolved config wherever it is to run."""
    problems = [*rules.check(config, given), *context.check(config)]
    path = config.rollout.hf_checkpoint
    try:
        if path is not None:
            hf.check_config(path)
            _check_causal(config, path)
    except hf.CheckpointDirError as error:
        problems.append(problem(config, "hf_checkpoint", remedy=str(error)))
    return problems


def get_miles_extra_args_provider() -> Provider:
    """What Megatron's ``parse_args`` calls on its parser: adds all our arguments.

    Options that the parser has already keep their declaration and get our default.
    """
    return add_miles_arguments


def _check_backend(
    config: MilesConfig, given: frozenset[str], foreign: Sequence[Foreign]
) -> tuple[tuple[str, ...], list[Problem], list[Message]]:
    """``megatron_argv``, problems and messages."""
    if config.cluster.train_backend == "fsdp":
        refusals = [fsdp_arguments.refuse(flag) or unknown_flag(flag) for flag in foreign]
        only = _of_the_other_backend(config, given, "megatron")
        return (), [*fsdp_arguments.check(config, given), *only, *refusals], []
    megatron_argv, problems, messages = megatron_arguments.check(config, foreign)
    return megatron_argv, [*problems, *_of_the_other_backend(config, given, "fsdp")], messages


def _of_the_other_backend(config: MilesConfig, given: frozenset[str], other: str) -> list[Problem]:
    """Our flags that only the ``other`` backend has."""
    remedy = (
        f"the {config.cluster.train_backend} backend does not have it; leave it out, or train with "
        f"--train-backend {other}"
    )
    return [
        problem(config, spec.dest, remedy=remedy)
        for spec in flag_specs(MilesConfig)
        if spec.dest in given and (spec.group == other or f"_{other}_" in spec.dest)
    ]


def _without_consequences(problems: Sequence[Problem], line: CommandLine) -> list[Problem]:
    """Leave out complaints about the default that stands in for a value that cannot be read."""
    unreadable = {p.flag for p in line.problems}
    kept = [p for p in problems if not unreadable.intersection(p.flag.split(", "))]
    return [*line.problems, *kept]


def check_models(config: MilesConfig) -> list[Problem]:
    """The model is a complete Hugging Face directory, and so is the reference, which for Megatron
    may be a checkpoint of its own instead."""
    reference = config.algorithm.ref_load
    paths = [("hf_checkpoint", config.rollout.hf_checkpoint)]
    problems: list[Problem] = []
    if reference is not None and holds_steps(reference) and _trains_with_megatron(config):
        found = check_load(reference, "megatron", config.rollout.hf_checkpoint)
        problems += [replace(p, flag="--ref-load") for p in found]
    else:
        paths.append(("ref_load", reference))
        problems += _unused_reference(config)
    checked: set[str] = set()
    for dest, path in paths:
        if path is None or path in checked:
            continue
        checked.add(path)
        try:
            hf.check_config(path)
            _check_causal(config, path)
            hf.check_directory(path)
        except hf.CheckpointDirError as error:
            problems.append(problem(config, dest, remedy=str(error)))
    return problems


def _check_causal(config: MilesConfig, path: str) -> None:
    """What loads models by ``AutoModelForCausalLM`` can load this one; Megatron and SGLang have
    model classes of their own. Raises ``CheckpointDirError``."""
    trains = not config.observability.debug_rollout_only
    embedded = config.rollout.rollout_engine == "embedded"
    if embedded or (trains and not _trains_with_megatron(config)):
        hf.check_causal(path)


def _unused_reference(config: MilesConfig) -> list[Problem]:
    if config.algorithm.ref_load is None or needs_reference(config):
        return []
    if not _trains_with_megatron(config):
        return []  # The table of flags without effect has it.
    if not (Path(config.algorithm.ref_load) / "config.json").is_file():
        return []  # It is none, which is told anyway.
    remedy = (
        "a Hugging Face directory is only read as a reference (--use-kl-loss or --kl-coef); the "
        "policy starts from --hf-checkpoint, or from a torch_dist checkpoint given here"
    )
    return [problem(config, "ref_load", remedy=remedy)]


def _trains_with_megatron(config: MilesConfig) -> bool:
    return config.cluster.train_backend == "megatron"


def check_machines(config: MilesConfig) -> list[Problem]:
    """Ranks and engines fit their machines, where slots are accelerators."""
    problems = machines.fit_machines(config)
    if not problems:
        return []
    # It takes torch's seconds, which a command line that fits is spared.
    from miles.core import device

    return problems if device.has_accelerator() else []


def check_checkpoint(config: MilesConfig) -> list[Problem]:
    """What --load names is a checkpoint of this model or the place of a fresh start."""
    return check_load(
        config.checkpoint.load, config.cluster.train_backend, config.rollout.hf_checkpoint
    )


def check_recorded_rollouts(config: MilesConfig) -> list[Problem]:
    """The first rollout of --load-debug-rollout-data is there."""
    problems = debug_data.check(config)
    template = config.observability.load_debug_rollout_data
    if template is None or problems:
        return problems
    first = config.data.start_rollout_id
    try:
        first = first_rollout_id(config.checkpoint.load) if first is None else first
    except ConfigError:
        return []  # ``check_checkpoint`` has it.
    return debug_data.check_record(template, first)


def check_places(config: MilesConfig) -> list[Problem]:
    """What is to be written can be."""
    directories = {
        "save": config.checkpoint.save,
        "run_dir": config.observability.run_dir,
        "tensorboard_dir": config.observability.tensorboard_dir,
        "wandb_dir": config.observability.wandb_dir,
    }
    if config.cluster.actor_num_nodes == 1:
        # Several machines have disks of their own, which only they can ask.
        directories["offload_train_disk_dir"] = config.offload.offload_train_disk_dir
    files = {
        "save_hf": config.checkpoint.save_hf,
        "save_debug_rollout_data": config.observability.save_debug_rollout_data,
        "save_trigger_sentinel": config.checkpoint.save_trigger_sentinel,
    }
    directories |= {dest: os.path.dirname(path) or "." for dest, path in files.items() if path}
    problems: list[Problem] = []
    for dest, directory in directories.items():
        reason = None if directory is None else places.reason_against(directory)
        if reason is not None:
            problems.append(problem(config, dest, remedy=reason))
    reason = _kind_that_takes_no_checkpoints(config.checkpoint.save)
    if reason is not None:
        problems.append(problem(config, "save", remedy=f"{reason}; give a directory of its own"))
    sentinel = config.checkpoint.save_trigger_sentinel
    if sentinel is not None and os.path.isdir(sentinel):
        remedy = "is a directory; name a file, which need not exist"
        problems.append(problem(config, "save_trigger_sentinel", remedy=remedy))
    return problems


def _kind_that_takes_no_checkpoints(save: str | None) -> str | None:
    """What the directory is instead, where a run would not find its checkpoints again."""
    if save is None or not os.path.isfile(os.path.join(save, record.FILE)):
        return None
    run = record.read_record(Path(save))
    if run is None:
        return "is a Hugging Face directory, from which no run resumes"
    # Earlier versions let a run have one directory for both.
    return None if holds_steps(save) else run_directory_of(run)


def check_wandb(config: MilesConfig) -> list[Problem]:
    """Weights & Biases is there, and knows who logs."""
    options = config.observability
    reason = wandb_account.reason_against(options.wandb_mode) if options.use_wandb else None
    if reason is None:
        return []
    dests = ("use_wandb",) if options.wandb_mode is None else ("use_wandb", "wandb_mode")
    return [problem(config, *dests, remedy=reason)]


HELP_OF_OTHERS: Mapping[str, Callable[[], str]] = {
    "--help-megatron": megatron_arguments.help_text,
    "--help-sglang": sglang_arguments.server_help,
    "--help-router": sglang_arguments.router_help,
}
"""The flags of others that pass through, listed by those who own them."""

OUTSIDE_CHECKS: tuple[Callable[[MilesConfig], list[Problem]], ...] = (
    check_models,
    check_machines,
    context.check,
    prompts.check,
    rewards.check,
    multi_turn.check,
    check_recorded_rollouts,
    check_checkpoint,
    check_places,
    check_save_hf,
    check_wandb,
    template_check.check_file,
    check_hooks,
)
"""Checks that look at files and at user code, and those of the modules that they serve."""


if __name__ == "__main__":
    print(configuration_page(MilesConfig), end="")
