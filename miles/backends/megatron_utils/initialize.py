"""Megatron's process-wide state: global arguments, process groups and seeds; its end too."""

import argparse
import logging
from contextlib import redirect_stdout
from os import devnull
from typing import Any

from megatron.core import parallel_state as groups
from megatron.training.global_vars import set_global_variables
from megatron.training.initialize import (
    _initialize_distributed,  # pyright: ignore[reportPrivateUsage]
)
from megatron.training.training import destroy_global_state

from miles.backends.megatron_utils import arguments, fused_adam, random_state
from miles.config.root import MilesConfig
from miles.contracts.parallel import ParallelState
from miles.core import distributed

mpu: Any = groups

_LEVELS = {
    "megatron": logging.WARNING,
    # They warn of what we know: the class of the model, and a service for faulty hardware.
    "megatron.core.models.gpt.gpt_model": logging.ERROR,
    "megatron.core.rerun_state_machine": logging.ERROR,
}


def initialize(config: MilesConfig) -> argparse.Namespace:
    """Make Megatron's arguments its global ones, build its groups and seed; collective.

    The default process group exists already. Raises ``ConfigError``.
    """
    args = arguments.parse(config)
    fused_adam.install()
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)
    # A life of this process that ended with an error has left its state.
    destroy_global_state()
    # Megatron prints what it does on rank 0, where the run's own lines belong.
    with open(devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        set_global_variables(args, build_tokenizer=False)
        _initialize_distributed(None, None, None)
        random_state.seed(args.seed, args)
    return args


def parallel_state() -> ParallelState:
    """Where this rank sits. Data-parallel ranks hold different samples; those of one
    context-parallel group share theirs."""
    dp_size = mpu.get_data_parallel_world_size()
    return ParallelState(
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=dp_size,
        dp_group=mpu.get_data_parallel_group() if dp_size > 1 else None,
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        cp_size=mpu.get_context_parallel_world_size(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
    )


def destroy() -> None:
    """Forget the groups and arguments, so that this process may initialize again. Idempotent."""
    destroy_global_state()
