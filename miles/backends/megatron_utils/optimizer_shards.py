"""The state of distributed optimizers in a checkpoint: main parameters and moments, each in its
parameter's shape, of which every rank writes and reads the part that it holds.

That is what Megatron calls ``fully_reshardable``, and its own reader reads it. megatron-core 0.19
itself gathers the whole state on one rank to write it, and each rank reads all of it: 32 and 12
bytes of host memory a parameter, and behind the first padded bucket of a gradient buffer it takes
each parameter's state from its neighbours' places.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from miles.backends.megatron_utils.fused_adam import MAIN, FusedAdam
from miles.backends.megatron_utils.partial_tensor import Box, PartialTensor, boxes
from miles.backends.megatron_utils.shards import local_tensors

SHARDING, GATHERED = "distrib_optim_sharding_type", "fully_reshardable"
PARAMETER = "param"
"""Megatron's name for the main parameter among the states of one."""

_COMPARED = 1024
"""Elements of a parameter: state of another one differs from the first on."""
_RELATIVE, _ABSOLUTE = 2.0**-7, 1e-6
"""More than bf16 rounds off, or fp16 near zero: the run that saved may have had either."""


class ForeignState(ValueError):
    """A step whose optimizer state belongs to other parameters; the message names some."""


@dataclass(frozen=True)
class Place:
    """Where a run of a flattened parameter's elements is in a tensor of the checkpoint."""

    first: int
    """In the parameter."""
    key: str
    shape: tuple[int, ...]
    """Of the run."""
    offsets: tuple[int, ...]
    """Of its first element in the whole tensor, which may have layers as dimensions before."""
    whole: tuple[int, ...]
    """The whole tensor's shape."""
    is_padded: bool
    """Whether the whole tensor may end earlier or later in another layout."""

    @classmethod
    def of(cls, described: ShardedTensor, view: Tensor) -> "Place":
        """``view``: of something in the parameter's shape."""
        assert view.is_contiguous(), f"{described.key} is no run of its parameter's elements"
        return cls(
            first=int(view.storage_offset()),
            key=described.key,
            shape=tuple(view.shape),
            offsets=tuple(described.global_offset),
            whole=tuple(described.global_shape),
            is_padded=described.allow_shape_mismatch,
        )

    def pieces(self, start: int, end: int) -> Iterator[Box]:
        """Of the elements from ``start`` to ``end`` of the parameter, those that are here, as boxes
        of the whole tensor; the ``start`` of a box is behind that of the elements."""
        numel = math.prod(self.shape)
        here = (max(start, self.first) - self.first, min(end, self.first + numel) - self.first)
        layers = len(self.whole) - len(self.shape)
        for box in boxes(self.shape, *here):
            inside = zip(self.offsets, (0,) * layers + box.offsets, strict=True)
            offsets = tuple(before + within for before, within in inside)
            sizes = (1,) * layers + box.sizes
            yield Box(offsets, sizes, self.first + box.start - start)


@dataclass(frozen=True)
class Shard:
    """The part of a parameter whose state is on this rank."""

    part: Any
    """The ``DistributedOptimizer``."""
    parameter: nn.Parameter
    start: int
    """In the flattened parameter; likewise the next."""
    end: int
    places: Sequence[Place]
    """Of the parameter: one, or some where it is fused of several."""
    is_written: bool
    """By this rank, and no other."""

    def states(self) -> dict[str, Tensor]:
        """Flat tensors of ``end - start``: those that are kept, where that is possible."""
        inner = self.part.optimizer
        if _holds_mains(self.part) and isinstance(inner, FusedAdam):
            group, order = self.part.model_param_group_index_map[self.parameter]
            held = dict(inner.state[inner.param_groups[group]["params"][order]])
            held[PARAMETER] = held.pop(MAIN)
        else:
            held = self.part._get_main_param_and_optimizer_states(self.parameter)
        # PyTorch's own Adam keeps its step count among them.
        return {k: v for k, v in held.items() if isinstance(v, Tensor) and k != "step"}

    def pieces(self) -> Iterator[tuple[Place, Box]]:
        """The shard, cut up."""
        for place in self.places:
            for box in place.pieces(self.start, self.end):
                yield place, box


@contextmanager
def left_in_place(parts: Sequence[Any]) -> Generator[list[Shard]]:
    """While Megatron makes the sharded state dict of an optimizer of these parts, it leaves
    parameters' states out; they are in the list instead."""
    found: list[Shard] = []
    distributed: list[Any] = [
        part
        for part in parts
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer
    ]
    for part in distributed:

        def note(model: Any, *_: Any, part: Any = part) -> dict[int, Any]:
            found.extend(_shards(part, model))
            return {}

        part.sharded_param_state_fully_reshardable = note
    try:
        yield found
    finally:
        for part in distributed:
            del part.sharded_param_state_fully_reshardable


def without_states(state: Any) -> Any:
    """A loaded state dict of a part, of which Megatron is to read no parameter's state."""
    return {key: value for key, value in state.items() if key != "param_state"}


def writable(shards: Sequence[Shard], *, copied: bool) -> dict[str, PartialTensor]:
    """What this rank writes, in fp32, by its name; ``copied``: as a copy in host memory."""
    whole: dict[str, tuple[int, ...]] = {}
    parts: dict[str, dict[torch.Size, Tensor]] = {}
    for shard in shards:
        if not shard.is_written:
            continue
        states = shard.states()
        for place, box in shard.pieces():
            for name, state in states.items():
                key, tensor = _key(name, place), _at(state, box)
                if copied:
                    tensor = tensor.to("cpu", torch.float32, copy=True)
                whole[key] = place.whole
                parts.setdefault(key, {})[torch.Size(box.offsets)] = tensor
    return {key: PartialTensor(whole[key], parts[key], torch.float32) for key in parts}


def names(shards: Sequence[Shard]) -> set[str]:
    """What ``read`` wants of a checkpoint."""
    return {
        _key(name, place) for shard in shards for name in shard.states() for place in shard.places
    }


def read(step: Path, shards: Sequence[Shard]) -> None:
    """Fill the states of the shards."""
    stored: Mapping[str, Any] = {**FileSystemReader(step).read_metadata().state_dict_metadata}
    states = [shard.states() for shard in shards]
    parts: dict[str, dict[torch.Size, Tensor]] = {}
    forms: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for shard, held in zip(shards, states, strict=True):
        for place, box in shard.pieces():
            for name, state in held.items():
                key, target = _key(name, place), _at(state, box)
                whole = stored[key].size if place.is_padded else place.whole
                target = _within(target, box, whole)
                if target.numel():
                    parts.setdefault(key, {})[torch.Size(box.offsets)] = target
                    forms[key] = (whole, state.dtype)
    # Alone: each rank reads what it needs, whatever the others do.
    dcp_load(
        {key: PartialTensor(forms[key][0], found, forms[key][1]) for key, found in parts.items()},
        storage_reader=FileSystemReader(step),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    for shard, held in zip(shards, states, strict=True):
        if _holds_mains(shard.part) and not isinstance(shard.part.optimizer, FusedAdam):
            # Transformer Engine keeps them scaled: these were copies.
            shard.part._set_main_param_and_optimizer_states(shard.parameter, held)


def check_owners(shards: Sequence[Shard], chunks: Sequence[nn.Module]) -> None:
    """Raise ``ForeignState`` if main parameters that were read are not the weights that were."""
    known = {id(parameter): name for name, parameter in local_tensors(chunks).items()}
    foreign = [
        known[id(shard.parameter)]
        for shard in shards
        if _has_mains(shard.part) and not _is_rounded(shard)
    ]
    if foreign:
        raise ForeignState(f"{len(foreign)} parameters, among them {', '.join(foreign[:3])}")


def _shards(part: Any, model: Any) -> Iterator[Shard]:
    tensors, _ = extract_sharded_tensors_and_factories(model)
    described = {leaf.data: leaf for leaf in nested_values(tensors)}
    for buffer in part.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for parameter, ranges in bucket["param_map"].items():
                leaf = described[parameter]
                # The last of a replica's coordinates is the data-parallel rank: each of those has
                # a part of its own.
                is_first = not any(leaf.replica_id[:-1])
                yield Shard(
                    part=part,
                    parameter=parameter,
                    start=ranges[PARAMETER].start,
                    end=ranges[PARAMETER].end,
                    places=_places(leaf),
                    is_written=is_first and part.distributed_optimizer_instance_id == 0,
                )


def _places(leaf: Any) -> list[Place]:
    if isinstance(leaf, ShardedTensor):
        return [Place.of(leaf, torch.empty(leaf.local_shape, device="meta"))]
    assert isinstance(leaf, ShardedTensorFactory), leaf
    # It cuts whatever it is given, and what comes out tells where it was in that.
    blank = torch.empty(leaf.data.shape, device="meta")
    built: Any = leaf.build_fn(leaf.key, blank, leaf.replica_id, None)
    return [Place.of(cut, cut.data) for cut in nested_values({"": built})]


def _key(name: str, place: Place) -> str:
    return f"optimizer.state.{name}.{place.key}"


def _at(state: Tensor, box: Box) -> Tensor:
    return state.detach().view(-1)[box.start : box.start + box.numel].view(box.sizes)


def _within(target: Tensor, box: Box, size: Sequence[int]) -> Tensor:
    """Of what is at this box, as much as a tensor of this size has; zeros behind it."""
    for axis, (offset, end) in enumerate(zip(box.offsets, size, strict=True)):
        length = min(max(end - offset, 0), target.size(axis))
        target.narrow(axis, length, target.size(axis) - length).zero_()
        target = target.narrow(axis, 0, length)
    return target


def _holds_mains(part: Any) -> bool:
    """Whether Adam itself holds the main parameters."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def _has_mains(part: Any) -> bool:
    """Transformer Engine's precision-aware Adam may give bits instead, which complete weights."""
    return isinstance(part.optimizer, FusedAdam) or not _holds_mains(part)


def _is_rounded(shard: Shard) -> bool:
    # fp8 rounds off so much that another parameter could pass for this one.
    if DistributedOptimizer._is_distopt_quantized_param(shard.parameter):  # pyright: ignore[reportPrivateUsage]
        return True
    exact = shard.states()[PARAMETER].detach().view(-1)[:_COMPARED]
    end = shard.start + exact.numel()
    held = shard.parameter.detach().view(-1)[shard.start : end]
    return torch.allclose(held.to(exact), exact, rtol=_RELATIVE, atol=_ABSOLUTE)
