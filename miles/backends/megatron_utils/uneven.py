"""Collectives over parts of unequal length, which NCCL has and gloo has not: under expert tensor
parallelism the ranks of an expert get unequal numbers of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's gather along the first dimension, for any ``sizes`` of the ranks' parts."""

    @functools.wraps(original)
    def gathered(
        tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, use_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(tensor, group, sizes, use_buffer)
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        for rank, part in enumerate(whole.split(sizes)):
            if rank == group.rank():
                part.copy_(tensor)
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return whole

    return gathered


def reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its reverse: the sum over the ranks, of which each gets its part."""

    @functools.wraps(original)
    def scattered(
        tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, use_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(tensor, group, sizes, use_buffer)
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    return scattered
