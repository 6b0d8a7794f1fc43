"""Hooks of a user: a log of what ran when."""

import hashlib
from argparse import Namespace
from typing import Any

import torch
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


def digest_before_log_prob(args: Namespace, model: list[nn.Module], store_prefix: str) -> None:
    del args
    if not store_prefix:
        seen.append(_digests(model))


def digest_before_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: list[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    del args, rollout_id, step_id, optimizer, opt_param_scheduler
    seen.append(_digests(model))


def halve_before_second_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: list[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    del args, rollout_id, opt_param_scheduler
    if step_id != 1:
        return
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.mul_(0.5)
    optimizer.reload_model_params()


def _digests(model: list[nn.Module]) -> tuple[str, ...]:
    return tuple(
        hashlib.sha256(p.detach().cpu().view(-1).view(torch.uint8).numpy()).hexdigest()
        for chunk in model
        for p in chunk.parameters()
    )
