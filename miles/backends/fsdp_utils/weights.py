"""Weights under Hugging Face names: matching a checkpoint with the model, streaming it in full."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles.backends.training_utils.offload_store import OffloadStore
from miles.contracts.types import NamedTensor
from miles.core import device
from miles.core.experts import ExpertSlice, expert_slices
from miles.core.hf import CheckpointDirError


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint as the model holds it."""

    key: str
    """Name in the model (``named_parameters`` or ``named_buffers``)."""
    name: str
    """Name in the checkpoint: differs from ``key`` where tied weights share a tensor, and of
    experts that the model holds in one parameter."""
    dtype: torch.dtype
    """In which it leaves the trainer."""
    shape: torch.Size
    part: ExpertSlice | None = None
    """Which part of the model's tensor it is; ``None``: all of it."""

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers; a tied tensor once, under its first name."""
    return {**dict(model.named_parameters()), **named_buffers(model)}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What FSDP does not shard: every rank has all of it on its device."""
    return dict(model.named_buffers())


def match_weights(
    model: nn.Module, stored: Mapping[str, torch.dtype], hf_checkpoint: str
) -> list[Weight]:
    """Find each checkpoint tensor in the model, in the model's order, with its stored dtype.

    Buffers that the checkpoint does not hold are left out. Raises ``CheckpointDirError`` when a
    parameter has no tensor: its weights could not be sent to an engine under a name it knows.
    """
    aliases: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(key)
    weights: list[Weight] = []
    missing: list[str] = []
    for key, parameter in model.named_parameters():
        name = next((alias for alias in aliases[id(parameter)] if alias in stored), None)
        if name is not None:
            weights.append(Weight(key, name, stored[name], parameter.shape))
            continue
        parts = expert_slices(key, parameter.shape, stored)
        if not parts:
            missing.append(key)
        for part in parts:
            if part.name in stored:
                shape = torch.Size([part.stop - part.start, parameter.shape[2]])
                weights.append(Weight(key, part.name, stored[part.name], shape, part))
            else:
                missing.append(part.name)
    if missing:
        raise CheckpointDirError(
            f"{hf_checkpoint!r} has no tensor named {', '.join(missing[:3])} ({len(missing)} such);"
            " the FSDP backend trains models whose checkpoint uses transformers' own names"
        )
    weights += [
        Weight(key, key, stored[key], buffer.shape)
        for key, buffer in model.named_buffers()
        if key in stored
    ]
    return weights


def dtypes_by_key(weights: Sequence[Weight]) -> dict[str, torch.dtype]:
    """Of each of the model's tensors: one that holds the dtypes of all its parts exactly."""
    dtypes: dict[str, torch.dtype] = {}
    for weight in weights:
        dtypes[weight.key] = torch.promote_types(dtypes.get(weight.key, weight.dtype), weight.dtype)
    return dtypes


def stream_weights(
    model: nn.Module, weights: Sequence[Weight], store: OffloadStore
) -> Iterator[NamedTensor]:
    """Yield every weight in full on every rank, cast to its dtype; collective, also asleep.

    The receiver owns the tensors: none shares storage with the model or another one.
    """
    tensors, dtypes = model_tensors(model), dtypes_by_key(weights)
    for key, group in groupby(weights, key=lambda weight: weight.key):
        tensor = tensors[key]
        # Gathered on the device, also what --fsdp-cpu-offload holds in host memory. That is next
        # written by an optimizer step, whose gradients have waited for this copy.
        held = store.read(key, tensor).to(device.current_device(), non_blocking=True)
        # Cast first: a cast is elementwise, and the gather then moves the narrower dtype.
        full = _full(held.to(dtypes[key]), tensor)
        if full.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            full = full.clone()
        for weight in group:
            out = full if weight.part is None else weight.part.of(full).clone()
            yield NamedTensor(weight.name, out.to(weight.dtype).contiguous())


def _full(local: Tensor, tensor: Tensor) -> Tensor:
    """The whole of ``tensor``, of which ``local`` is this rank's shard."""
    if not isinstance(tensor, DTensor):
        return local
    sharded = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return sharded.full_tensor()
