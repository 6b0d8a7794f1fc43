"""Hooks of a user: a log of what ran when."""

from argparse import Namespace
from typing import Any

from torch import nn

seen: list[tuple[Any, ...]] = []
"""Of this process."""


def init(args: Namespace) -> None:
    from megatron.core import parallel_state

    seen.append(("init", args.hidden_size, parallel_state.get_tensor_model_parallel_world_size()))


def before_log_prob(args: Namespace, model: list[nn.Module], store_prefix: str) -> None:
    del args
    seen.append(("log-probs", len(model), store_prefix))


def before_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: list[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    del args, model, optimizer
    seen.append(("step", rollout_id, step_id, opt_param_scheduler.num_steps))
