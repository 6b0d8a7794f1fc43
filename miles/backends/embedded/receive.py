"""The engine's half of each weight transport: from bytes outside into the model's parameters.

A bucket is refused as a whole before anything is written: a model never holds half a bucket.
Nothing here unpickles what it receives.
"""

import _posixshmem
import mmap
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from miles.contracts.types import NamedTensor, TensorSpec
from miles.core.distributed import JoinedGroup, join_group
from miles.core.experts import expert_slices
from miles.weight_sync.checksums import checksum

SHM_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class WeightLoadError(ValueError):
    """The sender asks for what this model cannot load; nothing was written."""


class _ShmBucket(msgspec.Struct, forbid_unknown_fields=True):
    shm: str
    nbytes: int
    entries: list[tuple[str, str, list[int], int]]


class WeightReceiver:
    """Writes arriving weights into ``model``, by the checkpoint's names.

    These are the model's own, but for experts that the checkpoint (which holds the names
    ``stored``) keeps one by one. Parameters and persistent buffers can be loaded; of tied ones
    either name will do. ``cast``
    says that the engine was started in another dtype than the checkpoint's: then a floating
    tensor is converted instead of refused. The caller sees to it that the model does not run
    meanwhile.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        cast: bool = False,
        stored: Collection[str] = (),
    ) -> None:
        self._device = device
        self._cast = cast
        self._targets: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            parts = expert_slices(name, value.shape, stored)
            self._targets |= {part.name: part.of(value.detach()) for part in parts}
            if not parts:
                self._targets[name] = value.detach()
        self._groups: dict[str, tuple[JoinedGroup, float]] = {}
        self._received: set[str] = set()
        # Digest of what arrived under a name, where a cast keeps it from being computed later.
        self._cast_digests: dict[str, str] = {}

    def load_shm(self, payload: str) -> None:
        """Load a bucket from POSIX shared memory, given as JSON ``{shm, nbytes, entries: [[name,
        dtype, shape, offset], ...]}``."""
        try:
            bucket = msgspec.json.decode(payload, type=_ShmBucket)
        except msgspec.DecodeError as error:
            raise WeightLoadError(f"not a shm_bucket: {error}") from error
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, dtype, shape, _ in bucket.entries
        ]
        self._validate(specs)
        for spec, (_, _, _, offset) in zip(specs, bucket.entries, strict=True):
            _check_range(spec, offset, bucket.nbytes)
        memory = _map_shm(bucket.shm, bucket.nbytes)
        self._copy(
            NamedTensor(name=spec.name, tensor=_view(memory, spec, offset))
            for spec, (_, _, _, offset) in zip(specs, bucket.entries, strict=True)
        )

    def init_group(  # noqa: PLR0913 (the protocol's own fields)
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join the trainer's process group as rank ``rank_offset``; returns when all are there.

        A group of the same name is replaced."""
        self.destroy_group(group_name)
        group = join_group(
            group_name, master_address, master_port, rank_offset, world_size, backend, timeout_s
        )
        self._groups[group_name] = (group, timeout_s)

    def load_group(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> None:
        """Receive these tensors, in this order, by broadcast from rank 0.

        Any failure ends the group: the sender's broadcast then fails at once instead of waiting
        for an engine that does not listen.
        """
        if group_name not in self._groups:
            raise WeightLoadError(f"no weight group {group_name!r} (there are: {[*self._groups]})")
        group, timeout_s = self._groups[group_name]
        try:
            if not len(names) == len(dtypes) == len(shapes):
                raise WeightLoadError("names, dtypes and shapes differ in length")
            specs = [
                TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            ]
            self._validate(specs)
            buffers = [
                torch.empty(spec.shape, dtype=spec.torch_dtype, device=self._device)
                for spec in specs
            ]
            group.broadcast(
                buffers, watch=lambda: self._still_open(group_name), timeout_s=timeout_s
            )
        except BaseException:
            self.destroy_group(group_name)
            raise
        self._copy(
            NamedTensor(name=spec.name, tensor=buffer)
            for spec, buffer in zip(specs, buffers, strict=True)
        )

    def destroy_group(self, group_name: str) -> None:
        """Leave the group (also from another thread than the one that waits in it). Idempotent."""
        group, _ = self._groups.pop(group_name, (None, 0.0))
        if group is not None:
            group.close()

    def load_disk(self, path: str) -> None:
        """Load the safetensors of a Hugging Face directory; all headers are checked before any
        tensor is copied."""
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise WeightLoadError(f"{path}: no *.safetensors")
        with_specs = [(file, _file_specs(file)) for file in files]
        self._validate([spec for _, specs in with_specs for spec in specs])
        for file, specs in with_specs:
            with safe_open(file, framework="pt") as opened:
                self._copy(
                    NamedTensor(name=spec.name, tensor=opened.get_tensor(spec.name))
                    for spec in specs
                )

    def checksums(self) -> dict[str, str]:
        """Name -> xxh3-128 digest of each weight's bytes.

        A tied weight appears under the name it was sent by. Where a cast changed the bytes, the
        digest is that of the bytes received, so that it can be compared with the sender's.
        """
        return {
            name: self._cast_digests.get(name) or checksum(self._targets[name])
            for name in self._reported_names()
        }

    def _reported_names(self) -> list[str]:
        aliases: dict[tuple[int, torch.Size, tuple[int, ...]], list[str]] = {}
        for name, target in self._targets.items():
            key = (target.data_ptr() or id(target), target.shape, target.stride())
            aliases.setdefault(key, []).append(name)
        names: list[str] = []
        for same in aliases.values():
            names += [name for name in same if name in self._received] or same[:1]
        return names

    def _still_open(self, group_name: str) -> None:
        if group_name not in self._groups:
            raise WeightLoadError(f"weight group {group_name!r} was destroyed while loading")

    def _validate(self, specs: list[TensorSpec]) -> None:
        seen: set[str] = set()
        for spec in specs:
            if spec.name in seen:
                raise WeightLoadError(f"{spec.name} comes twice in one bucket")
            seen.add(spec.name)
            if spec.name not in self._targets:
                raise WeightLoadError(f"the model has no weight {spec.name!r}")
            target = self._targets[spec.name]
            if spec.shape != tuple(target.shape):
                raise WeightLoadError(
                    f"{spec.name}: shape {list(spec.shape)} for a weight of {list(target.shape)}"
                )
            self._validate_dtype(spec, target.dtype)

    def _validate_dtype(self, spec: TensorSpec, wanted: torch.dtype) -> None:
        try:
            dtype = spec.torch_dtype
        except ValueError as error:
            raise WeightLoadError(str(error)) from error
        castable = self._cast and dtype.is_floating_point and wanted.is_floating_point
        if dtype != wanted and not castable:
            raise WeightLoadError(
                f"{spec.name}: {spec.dtype} for a weight of {str(wanted).removeprefix('torch.')}"
            )

    @torch.no_grad()
    def _copy(self, tensors: Iterable[NamedTensor]) -> None:
        for named in tensors:
            target = self._targets[named.name]
            if named.tensor.dtype != target.dtype:
                self._cast_digests[named.name] = checksum(named.tensor)
            else:
                self._cast_digests.pop(named.name, None)
            target.copy_(named.tensor)
            self._received.add(named.name)


def _check_range(spec: TensorSpec, offset: int, num_bytes: int) -> None:
    dtype = spec.torch_dtype
    needed = dtype.itemsize
    for size in spec.shape:
        needed *= size
    if offset < 0 or offset + needed > num_bytes:
        raise WeightLoadError(
            f"{spec.name}: bytes {offset}..{offset + needed} of a bucket of {num_bytes}"
        )
    if offset % dtype.itemsize:
        raise WeightLoadError(f"{spec.name}: offset {offset} is not aligned for {spec.dtype}")


def _map_shm(name: str, num_bytes: int) -> mmap.mmap:
    """Map a segment privately, without write access to it.

    Not ``SharedMemory``: before Python 3.13 a process that merely attaches registers the segment
    with its resource tracker, which would unlink it (and warn) when this engine ends.
    """
    if not SHM_NAME.fullmatch(name):
        raise WeightLoadError(f"{name!r} is not a shared-memory name")
    try:
        descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDONLY, mode=0)
    except OSError as error:
        raise WeightLoadError(f"shared memory {name!r}: {error.strerror}") from error
    try:
        size = os.fstat(descriptor).st_size
        if num_bytes < 0 or num_bytes > size or size == 0:
            raise WeightLoadError(f"shared memory {name!r}: {num_bytes} bytes asked, it has {size}")
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _view(memory: mmap.mmap, spec: TensorSpec, offset: int) -> Tensor:
    if 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    count = torch.Size(spec.shape).numel()
    flat = torch.frombuffer(memory, dtype=spec.torch_dtype, count=count, offset=offset)
    return flat.reshape(spec.shape)


def _file_specs(file: Path) -> list[TensorSpec]:
    specs: list[TensorSpec] = []
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            header = opened.get_slice(name)
            dtype = header.get_dtype()
            if dtype not in SAFETENSORS_DTYPES:
                raise WeightLoadError(f"{file}: {name} has the unsupported dtype {dtype}")
            shape = tuple(header.get_shape())
            specs.append(TensorSpec(name=name, dtype=SAFETENSORS_DTYPES[dtype], shape=shape))
    return specs
