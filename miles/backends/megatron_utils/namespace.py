"""Megatron's own parser and validation, called as functions: argv in, namespace out.

Megatron reads ``sys.argv``, asks the GPU while it validates, prints what it decides and ends the
process at the first thing it does not like; here none of this reaches the caller.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from miles.backends.megatron_utils import package, refusals
from miles.config.derived import total_optimizer_steps
from miles.config.flags import add_arguments, flag_specs
from miles.config.foreign_parser import HelpFormatter, Parser, asking
from miles.config.root import MilesConfig
from miles.config.rules.problems import values_of


def make_parser() -> argparse.ArgumentParser:
    """Megatron's options and ours; errors raise ``ArgumentError``."""
    from megatron.training.arguments import add_megatron_arguments

    parser = Parser(allow_abbrev=False, add_help=False)
    return add_miles_arguments(add_megatron_arguments(parser))


def add_miles_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags on a parser that has Megatron's."""
    add_arguments(parser, MilesConfig)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """``megatron.training.arguments.parse_args`` of ``argv``; rank and world size from the
    environment. Raises ``ArgumentError``."""
    from megatron.training.arguments import parse_args as megatron_parse_args

    with _own_argv(argv), asking():
        return megatron_parse_args(extra_args_provider=add_miles_arguments)


def help_text() -> str:
    """Megatron's options less those that Miles refuses or shares, group by group."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(
        argparse.ArgumentParser(
            usage="python train.py --train-backend megatron ... [MEGATRON FLAGS]",
            description="Megatron-LM's own flags. Where none of the architecture is given, it is "
            "that of --hf-checkpoint.",
            allow_abbrev=False,
            add_help=False,
            formatter_class=HelpFormatter,
        )
    )
    shared = {option for spec in flag_specs(MilesConfig) for option in spec.options}
    for group in parser._action_groups:  # pyright: ignore[reportPrivateUsage]
        for action in group._group_actions:  # pyright: ignore[reportPrivateUsage]
            name, title = action.option_strings[0], group.title or ""
            if name in shared or refusals.reason_against(name, title) is not None:
                action.help = argparse.SUPPRESS
        if all(action.help == argparse.SUPPRESS for action in group._group_actions):  # pyright: ignore[reportPrivateUsage]
            group.description = None
    return parser.format_help()


def validate(args: argparse.Namespace, config: MilesConfig, *, in_trainer: bool) -> None:
    """Give our options their values in ``config`` and let Megatron check and complete
    ``args``. Outside a trainer it asks no device. Raises ``ArgumentError``."""
    import torch
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        validate_args,
    )

    vars(args).update(_values(args, config))
    asks = in_trainer and torch.cuda.is_available()
    with asking(), contextlib.nullcontext() if asks else _no_questions_to_the_gpu():
        validate_args(args)
    # What validate_args leaves to the tokenizer that we do not build.
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    with asking():
        core_transformer_config_from_args(args)
        _check_optimizer(args)


def _check_optimizer(args: argparse.Namespace) -> None:
    """Let Megatron's optimizer look at its settings as it will when it is built."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from miles.backends.megatron_utils import fused_adam

    fused_adam.install()
    names = [field.name for field in dataclasses.fields(OptimizerConfig)]
    OptimizerConfig(**{name: vars(args)[name] for name in names if name in vars(args)})


def _values(args: argparse.Namespace, config: MilesConfig) -> Mapping[str, Any]:
    """Options whose values are those of ``config`` or follow from how Miles drives Megatron. Ours
    alone are there for hooks and specs."""
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    # Micro-batches come with each batch; Megatron's counter only wants a whole number of them.
    batch = {"micro_batch_size": 1, "global_batch_size": max(args.world_size // model_size, 1)}
    moe_grouped_gemm = args.moe_grouped_gemm and package.has_transformer_engine()
    return {
        **values_of(config),
        **batch,
        "bf16": not (config.precision.fp16 or config.precision.fp32),
        "train_iters": total_optimizer_steps(config),
        # Megatron does so for bf16 alone.
        "accumulate_allreduce_grads_in_fp32": (
            config.precision.fp16 or args.accumulate_allreduce_grads_in_fp32
        ),
        # Checkpoints and metrics are ours to write.
        "load": None,
        "save": None,
        "async_save": False,
        "tensorboard_dir": None,
        "wandb_project": "",
        # Losses are divided by the counts of the whole step already: gradients are summed.
        "calculate_per_token_loss": True,
        # A step whose gradient is not finite is skipped and counted, not the end of the run.
        "check_for_nan_in_loss_and_grad": False,
        # Without it the experts run one after another: the same numbers, slower.
        "moe_grouped_gemm": moe_grouped_gemm,
    }


@contextlib.contextmanager
def _own_argv(argv: Sequence[str]) -> Generator[None]:
    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _no_questions_to_the_gpu() -> Generator[None]:
    """Answer for a device of the newest kind: Megatron then demands no environment variables that
    only the trainer's processes have."""
    import torch

    properties = type("Properties", (), {"major": 10, "minor": 0})()
    replaced = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (10, 0),
    }
    before = {name: getattr(torch.cuda, name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)
