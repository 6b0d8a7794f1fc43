"""A tensor of a checkpoint of which a rank holds some boxes, written and read where they lie.

A range of a flattened tensor, which is what a distributed optimizer gives a rank, is a few boxes of
the tensor itself: PyTorch's distributed checkpoints store and read boxes, wherever they are cut.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Box:
    """A part of a tensor whose elements are neighbours in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Of its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements from ``start`` to ``end`` of a flattened tensor, in order, in as few boxes as
    possible: at most two for each dimension but the last, and one."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (end - start,) * len(shape), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        # Within one row.
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        none = (0,) * (len(shape) - 1)
        yield Box((first, *none), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[Box]:
    base = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, end - base):
        yield Box((row, *box.offsets), (1, *box.sizes), base + box.start)


class PartialTensor(Tensor):
    """A tensor as PyTorch's distributed checkpoints know one
    (``torch.distributed._checkpointable``): its shape, and this rank's boxes of it. Nothing can be
    computed with it.

    ``parts``: what lies at which offsets. It is written in ``dtype``, and read into parts of
    ``dtype``.
    """

    parts: Mapping[torch.Size, Tensor]

    @staticmethod
    def __new__(
        cls: Any, shape: Sequence[int], parts: Mapping[torch.Size, Tensor], dtype: torch.dtype
    ) -> "PartialTensor":
        make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        made: PartialTensor = make(cls, torch.Size(shape), dtype=dtype)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(
        cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} of a tensor that can only be written and read")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=part.size())
            for offsets, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset].detach().to(self.dtype)
