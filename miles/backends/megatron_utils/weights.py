"""Weights between model chunks and Hugging Face names: loading a checkpoint into the shards of
this rank, and streaming full tensors out of the shards of all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles.backends.megatron_utils.converters import Converter
from miles.backends.megatron_utils.converters.table import (
    Entry,
    Split,
    pad_vocab,
    shard,
    unshard,
)
from miles.backends.megatron_utils.shards import (
    Axis,
    Layout,
    held_by_stage,
    local_tensors,
    place,
)
from miles.backends.training_utils.hf_files import Header, HFFiles
from miles.contracts.types import NamedTensor
from miles.core import distributed
from miles.core.hf import CheckpointDirError

ReadLocal = Callable[[str, Tensor], Tensor]
"""``OffloadStore.read``: this rank's shard, wherever its bytes are, from its global name and the
live tensor."""


def load_hf(chunks: Sequence[nn.Module], converter: Converter, directory: str | Path) -> None:
    """Fill the parameters of every rank from a Hugging Face directory. Collective.

    Each rank reads the tensors, and where the split allows the slices, that it holds. Values are
    cast to the parameter's dtype. Raises on every rank when tensors are missing, of another shape,
    or unknown to the model.
    """
    tensors, layout = local_tensors(chunks), Layout.current()
    held = held_by_stage(tensors, layout.pipeline)
    error: Exception | None = None
    try:
        files = HFFiles(directory)
        _check_names(converter, files)
        _check_complete(converter, files, {place(name) for names in held for name in names})
        _load(tensors, converter, files, layout)
    except (OSError, ValueError) as caught:
        error = caught
    distributed.raise_together(error, f"--hf-checkpoint {directory}")


def stream_hf(
    chunks: Sequence[nn.Module],
    converter: Converter,
    files: HFFiles,
    read: ReadLocal = lambda _, tensor: tensor.detach(),
    *,
    fp16: bool = False,
) -> Iterator[NamedTensor]:
    """Yield every weight in full on every rank, named and typed as ``files`` has it. Collective.

    What the checkpoint has in bf16 leaves as fp16 in an ``fp16`` run, whose engines compute in
    fp16. Besides what it yields, a rank holds one full Megatron tensor at a time. The receiver owns
    the tensors: none shares storage with the model or another one.
    """
    headers = {header.name: header for header in exported(converter, files, fp16=fp16)}
    gather = _Gather(chunks, converter, headers, read)
    for entry in _resolved(converter, files):
        full, borrowed = gather(entry)
        for name, tensor in zip(entry.hf, entry.part(full), strict=True):
            out = tensor.to(headers[name].dtype).contiguous()
            storage = out.untyped_storage()
            is_own = storage.nbytes() == out.nbytes and storage.data_ptr() != borrowed
            yield NamedTensor(name, out if is_own else out.clone())


def exported(converter: Converter, files: HFFiles, *, fp16: bool = False) -> list[Header]:
    """What ``stream_hf`` yields, in its order. Raises ``CheckpointDirError``."""
    _check_names(converter, files)
    headers = [files.headers[name] for entry in _resolved(converter, files) for name in entry.hf]
    return [
        replace(header, dtype=torch.float16) if fp16 and header.dtype == torch.bfloat16 else header
        for header in headers
    ]


def _resolved(converter: Converter, files: HFFiles) -> Iterator[Entry]:
    """The entries under the names that the checkpoint uses."""
    for entry in converter.entries():
        if entry.hf[0] not in files.headers:
            for alias in entry.aliases:
                if alias in files.headers:
                    entry = replace(entry, hf=(alias,))
        yield entry


def _check_names(converter: Converter, files: HFFiles) -> None:
    entries = list(_resolved(converter, files))
    needed = {name: None for entry in entries for name in entry.hf}
    missing = [name for name in needed if name not in files.headers]
    if missing:
        raise CheckpointDirError(
            f"{str(files.directory)!r} has no tensor named {_shown(missing)}, which config.json "
            "calls for"
        )
    aliases = {alias for entry in entries for alias in entry.aliases}
    surplus = [
        name
        for name in files.headers
        if name not in needed and name not in aliases and not name.startswith(converter.not_trained)
    ]
    if surplus:
        raise CheckpointDirError(
            f"{str(files.directory)!r} holds tensors that its model family has no place for: "
            f"{_shown(surplus)}"
        )


def _check_complete(converter: Converter, files: HFFiles, held: set[str]) -> None:
    """A model with fewer layers would load part of the checkpoint."""
    entries = converter.entries()
    unused = [e.hf[0] for e in entries if place(e.megatron) not in held]
    if unused:
        raise ValueError(
            f"{str(files.directory)!r} holds tensors that the model has no parameter for: "
            f"{_shown(unused)}; compare the architecture flags with its config.json"
        )


def _load(
    tensors: Mapping[str, Tensor], converter: Converter, files: HFFiles, layout: Layout
) -> None:
    entries: dict[str, Entry] = {}
    for entry in _resolved(converter, files):
        entries |= dict.fromkeys((entry.megatron, *entry.tied), entry)
    unknown = [name for name in tensors if name not in entries]
    if unknown:
        raise ValueError(
            f"the model has parameters that the checkpoint {str(files.directory)!r} does not: "
            f"{_shown(unknown)}; compare the architecture flags with its config.json"
        )
    for name, parameter in tensors.items():
        entry = entries[name]
        value = _read_shard(entry, files, layout.shards(entry), parameter)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{' + '.join(entry.hf)} make {tuple(value.shape)} for {name}, which is "
                f"{tuple(parameter.shape)} in the model; compare the architecture flags with "
                f"{files.directory / 'config.json'}"
            )
        with torch.no_grad():
            parameter.copy_(value)


def _read_shard(entry: Entry, files: HFFiles, axis: Axis, parameter: Tensor) -> Tensor:
    """This rank's part of the entry's tensor, from slices of the checkpoint where that is equal."""
    shapes = [files.headers[name].shape for name in entry.hf]
    if entry.split is Split.VOCAB:
        (name,), rows, total = entry.hf, parameter.shape[0], shapes[0][0]
        start = min(axis.rank * rows, total)
        last = axis.rank == axis.size - 1
        stop = total if last else min(start + rows, total)
        return pad_vocab(files.read_slice(name, 0, start, stop), max(rows, stop - start))
    dim = 1 if entry.split is Split.ROW else 0
    sliceable = (
        entry.split is not Split.REPLICATED
        and all(shape[dim] % axis.size == 0 for shape in shapes)
        and (entry.units is None or entry.units % axis.size == 0)
    )
    if not sliceable:
        full = entry.join(_same_dtype([files.read(name) for name in entry.hf], parameter.dtype))
        return shard(full, entry.split, axis.size, axis.rank)
    slices: list[Tensor] = []
    for name, shape in zip(entry.hf, shapes, strict=True):
        length = shape[dim] // axis.size
        slices.append(files.read_slice(name, dim, axis.rank * length, (axis.rank + 1) * length))
    return entry.join(_same_dtype(slices, parameter.dtype))


def _same_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


class _Gather:
    """Gathers one entry after the other out of the shards of all ranks."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        converter: Converter,
        headers: Mapping[str, Header],
        read: ReadLocal,
    ) -> None:
        self._tensors = local_tensors(chunks)
        self._headers = headers
        self._read = read
        self._layout = Layout.current()
        self._device = next(iter(self._tensors.values())).device
        held = held_by_stage(self._tensors, self._layout.pipeline)
        # The first stage that has a name counts: tied weights lie in the last one as well.
        self._stage_of = {
            place(name): stage for stage in reversed(range(len(held))) for name in held[stage]
        }
        num_experts = 1 + max((entry.expert or 0) for entry in converter.entries())
        self._experts_per_rank = max(1, num_experts // self._layout.expert.size)

    def __call__(self, entry: Entry) -> tuple[Tensor, int | None]:
        """The full tensor without vocabulary padding, and the address of the storage it may share
        with what ``read`` gave."""
        layout, headers = self._layout, [self._headers[name] for name in entry.hf]
        # A cast is elementwise: before the gather it moves the narrower dtype.
        dtype = reduce(torch.promote_types, (header.dtype for header in headers))
        shape = entry.join([torch.empty(h.shape, device="meta") for h in headers]).shape
        stage, full, borrowed = self._stage_of[place(entry.megatron)], None, None
        if entry.megatron in self._tensors:
            held = self._read(entry.megatron, self._tensors[entry.megatron])
            borrowed = held.untyped_storage().data_ptr()
            full = unshard(self._shards(held.to(dtype), entry), entry.split)[: shape[0]]
        else:
            full = torch.empty(shape, dtype=dtype, device=self._device)
        assert full.shape == shape, f"{entry.megatron}: {tuple(full.shape)} for {tuple(shape)}"
        if entry.expert is not None and stage == layout.pipeline.rank:
            full = _broadcast(full, entry.expert // self._experts_per_rank, layout.expert)
        return _broadcast(full, stage, layout.pipeline), borrowed

    def _shards(self, local: Tensor, entry: Entry) -> list[Tensor]:
        axis = self._layout.shards(entry)
        if entry.split is Split.REPLICATED or axis.size == 1:
            return [local]
        local = local.contiguous()
        shards = [torch.empty_like(local) for _ in range(axis.size)]
        dist.all_gather([_bytes(piece) for piece in shards], _bytes(local), group=axis.group)
        return shards


def _broadcast(tensor: Tensor, source: int, axis: Axis) -> Tensor:
    if axis.size == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(_bytes(tensor), group=axis.group, group_src=source)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """gloo does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _shown(names: Sequence[str]) -> str:
    more = f" ({len(names)} such)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
