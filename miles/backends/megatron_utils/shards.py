"""Where the parts of the model lie: the axes that divide it, and this rank's tensors by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from miles.backends.megatron_utils.converters.table import Entry, global_name


@dataclass(frozen=True)
class Axis:
    """A parallel axis: its group and this rank's place in it."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: Any) -> "Axis":
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass(frozen=True)
class Layout:
    """The axes over which one model copy is divided."""

    tensor: Axis
    expert_tensor: Axis
    expert: Axis
    pipeline: Axis

    @classmethod
    def current(cls) -> "Layout":
        """Of Megatron's parallel state."""
        return cls(
            tensor=Axis.of(mpu.get_tensor_model_parallel_group()),
            expert_tensor=Axis.of(mpu.get_expert_tensor_parallel_group()),
            expert=Axis.of(mpu.get_expert_model_parallel_group()),
            pipeline=Axis.of(mpu.get_pipeline_model_parallel_group()),
        )

    def shards(self, entry: Entry) -> Axis:
        """The axis that divides the entry's tensor."""
        return self.tensor if entry.expert is None else self.expert_tensor


def local_tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """This rank's live parameters by global name."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        layer_offset, expert_offset = _offsets(chunk)
        for name, parameter in chunk.named_parameters():
            tensors[global_name(name, layer_offset, expert_offset)] = parameter
    return tensors


def held_by_stage(tensors: Mapping[str, Tensor], pipeline: Axis) -> list[list[str]]:
    """The names of this rank's tensors and of those at the same place of every other stage."""
    held: list[Any] = [list(tensors)]
    if pipeline.size > 1:
        held = [None] * pipeline.size
        dist.all_gather_object(held, list(tensors), group=pipeline.group)
    return held


def place(name: str) -> str:
    """Experts are divided alike in every layer: all of a layer's are where its first one is."""
    return name.split(".local_experts.")[0]


def _offsets(chunk: nn.Module) -> tuple[int, int]:
    """How many layers and experts come before this chunk's first."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    layers = model.decoder.layers
    config = model.config
    num_local = (config.num_moe_experts or 0) // config.expert_model_parallel_size
    layer_offset = layers[0].layer_number - 1 if len(layers) else 0
    return layer_offset, num_local * mpu.get_expert_model_parallel_rank()
