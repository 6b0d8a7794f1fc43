"""What a converter is made of: one entry for each Megatron tensor, and how tensors are sharded.

A Megatron tensor here is the full one, of one process, under its global name: layers counted over
the whole model, each expert by its own number, layer norms as modules of their own.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Split(Enum):
    """How tensor parallelism divides a tensor."""

    REPLICATED = "replicated"
    COLUMN = "column"
    """Dimension 0."""
    ROW = "row"
    """Dimension 1."""
    GATED = "gated"
    """Dimension 0 of each half: a rank holds its part of the gate above its part of the rest."""
    VOCAB = "vocab"
    """Dimension 0, padded with zeros to the padded vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One Megatron tensor and the checkpoint tensors that it is made of."""

    megatron: str
    """Global name, as in ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    hf: tuple[str, ...]
    split: Split
    """Over tensor parallelism; of an expert's tensor, over expert tensor parallelism."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """Checkpoint tensors to the full Megatron tensor. Slices of whole ``units`` join to a slice."""
    part: Callable[[Tensor], tuple[Tensor, ...]]
    """The inverse, bit for bit, of a full tensor."""
    units: int | None = None
    """How many indivisible blocks the split dimension has; ``None``: it divides anywhere."""
    expert: int | None = None
    """Number of the expert whose tensor this is."""
    tied: tuple[str, ...] = ()
    """Other global names under which a pipeline stage may hold the same tensor."""
    aliases: tuple[str, ...] = ()
    """What a checkpoint may call the (single) tensor instead."""


def shard(tensor: Tensor, split: Split, size: int, rank: int) -> Tensor:
    """Part ``rank`` of ``size`` of a full tensor (a padded one, for ``VOCAB``).

    Raises ``ValueError`` when the dimension does not divide.
    """
    if split is Split.REPLICATED or size == 1:
        return tensor
    if split is Split.GATED:
        gate, rest = _chunks(tensor, 2, 0)
        return torch.cat([_chunks(gate, size, 0)[rank], _chunks(rest, size, 0)[rank]])
    return _chunks(tensor, size, _dimension(split))[rank].contiguous()


def unshard(shards: Sequence[Tensor], split: Split) -> Tensor:
    """The full tensor of which ``shards`` are the parts, in the order of ranks."""
    if split is Split.REPLICATED or len(shards) == 1:
        return shards[0]
    if split is Split.GATED:
        halves = [_chunks(piece, 2, 0) for piece in shards]
        return torch.cat([gate for gate, _ in halves] + [rest for _, rest in halves])
    return torch.cat(list(shards), _dimension(split))


def pad_vocab(tensor: Tensor, rows: int) -> Tensor:
    """Append zero rows up to ``rows``."""
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


_WRAPPERS = re.compile(r"^(module\.)+")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\blocal_experts\.(\d+)\.")
_GROUPED = re.compile(r"\bexperts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """The name in the table of what this rank's model chunk calls ``local_name``.

    Undoes wrappers (``module.``), the numbering of a pipeline chunk's layers and of a rank's
    experts, grouped expert weights (``weight0``) and layer norms fused into the next linear layer.
    """
    name = _WRAPPERS.sub("", local_name)
    name = _GROUPED.sub(r"experts.local_experts.\3.\1.\2", name)
    for fused, own in _FUSED_NORMS:
        name = name.replace(fused, own)
    name = _LAYER.sub(lambda m: f"layers.{int(m[1]) + layer_offset}.", name, count=1)
    return _EXPERT.sub(lambda m: f"local_experts.{int(m[1]) + expert_offset}.", name)


def _dimension(split: Split) -> int:
    return 1 if split is Split.ROW else 0


def _chunks(tensor: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    if tensor.shape[dim] % count:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} does not divide by {count}")
    return tensor.chunk(count, dim)
