"""The state of distributed optimizers gathered into whole tensors, which any layout can read.

What Megatron calls ``fully_reshardable``: for each parameter its main copy and its moments, in the
parameter's shape.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from miles.backends.megatron_utils.fused_adam import FusedAdam
from miles.backends.megatron_utils.shards import local_tensors

SHARDING, GATHERED = "distrib_optim_sharding_type", "fully_reshardable"

_COMPARED = 1024
"""Elements of a parameter: state of another one differs from the first on."""
_RELATIVE, _ABSOLUTE = 2.0**-7, 1e-6
"""More than bf16 rounds off, or fp16 near zero: the run that saved may have had either."""


class ForeignState(ValueError):
    """A step whose optimizer state belongs to other parameters; the message names some."""


@contextmanager
def placed_without_padding(parts: Sequence[Any]) -> Generator[None]:
    """While Megatron makes the sharded state dict of an optimizer of these parts.

    megatron-core 0.19 leaves the padding between the buckets of a gradient buffer out when it
    gathers the state, but then cuts it up at places that count the padding: behind the first
    padded bucket every parameter would be saved with its neighbours' state.
    """
    buffers = [
        buffer
        for part in parts
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer
        for buffer in part.buffers
    ]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _places_without_padding(buffer)
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def check_owners(
    parts: Sequence[Any], states: Sequence[Mapping[Any, Any]], chunks: Sequence[nn.Module]
) -> None:
    """Raise ``ForeignState`` if main parameters read from a step are not the weights read from it.

    ``states`` are the loaded state dicts of an optimizer's ``parts``; ``chunks`` have the weights.
    """
    names = {id(parameter): name for name, parameter in local_tensors(chunks).items()}
    foreign = [
        names[id(parameter)]
        for part, state in zip(parts, states, strict=True)
        if state.get("param_state_sharding_type") == GATHERED and _has_mains(part)
        for parameter, main in _with_mains(part, state["param_state"])
        if not _is_rounded(parameter, main)
    ]
    if foreign:
        raise ForeignState(f"{len(foreign)} parameters, among them {', '.join(foreign[:3])}")


def _has_mains(part: Any) -> bool:
    """Transformer Engine's precision-aware Adam may give bits instead, which complete weights."""
    precision_aware = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return isinstance(part.optimizer, FusedAdam) or not precision_aware


def _places_without_padding(buffer: Any) -> dict[nn.Parameter, tuple[int, int, int]]:
    """Start, end and bucket of each parameter, in the buffer's own order."""
    shifts: list[int] = []
    num_before = 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - num_before)
        num_before += bucket.numel_unpadded
    return {
        parameter: (start - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _with_mains(part: Any, states: Mapping[int, Any]) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its loaded main one: states are numbered in the order of the buffers."""
    parameters = [p for buffer in part.buffers for p in buffer.param_index_map]
    return [(parameter, states[number]["param"]) for number, parameter in enumerate(parameters)]


def _is_rounded(parameter: nn.Parameter, main: Tensor) -> bool:
    # fp8 rounds off so much that another parameter could pass for this one.
    if DistributedOptimizer._is_distopt_quantized_param(parameter):  # pyright: ignore[reportPrivateUsage]
        return True
    held, exact = (tensor.detach().reshape(-1)[:_COMPARED] for tensor in (parameter, main))
    return torch.allclose(held.to(exact), exact, rtol=_RELATIVE, atol=_ABSOLUTE)
