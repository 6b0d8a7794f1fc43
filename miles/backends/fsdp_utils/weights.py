"""Weights under Hugging Face names: what a checkpoint holds, streaming full tensors, exporting."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles.backends.training_utils.offload_store import HostStore
from miles.contracts.types import NamedTensor
from miles.core import distributed
from miles.core.hf import CheckpointDirError

SHARD_BYTES = 5 * 10**9
"""Largest file of an export."""

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint as the model holds it."""

    key: str
    """Name in the model (``named_parameters`` or ``named_buffers``)."""
    name: str
    """Name in the checkpoint: differs from ``key`` only where tied weights share a tensor."""
    dtype: torch.dtype
    """In which it leaves the trainer."""
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def checkpoint_dtypes(path: str) -> dict[str, torch.dtype]:
    """Dtype of each tensor in a Hugging Face directory, read from the headers.

    Raises ``CheckpointDirError`` for dtypes that this backend does not train (quantized weights).
    """
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return _pickled_dtypes(folder)
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                code = tensors.get_slice(name).get_dtype()
                if code not in _DTYPES:
                    raise CheckpointDirError(
                        f"{file}: {name} is stored as {code}; convert the checkpoint to bf16 first"
                    )
                dtypes[name] = _DTYPES[code]
    return dtypes


def _pickled_dtypes(folder: Path) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        tensors = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
        dtypes |= {name: tensor.dtype for name, tensor in tensors.items()}
    return dtypes


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers; a tied tensor once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
        if name is None:
            missing.append(key)
        else:
            weights.append(Weight(key, name, stored[name], parameter.shape))
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


def stream_weights(
    model: nn.Module, weights: Sequence[Weight], store: HostStore
) -> Iterator[NamedTensor]:
    """Yield every weight in full on every rank, cast to its dtype; collective, also asleep.

    The receiver owns the tensors: none shares storage with the model.
    """
    tensors = model_tensors(model)
    for weight in weights:
        tensor = tensors[weight.key]
        # Cast first: a cast is elementwise, and the gather then moves the narrower dtype.
        held = store.read(weight.key, tensor)
        local = held.to(weight.dtype)
        if isinstance(tensor, DTensor):
            sharded = DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            local = sharded.full_tensor()
        if local.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            local = local.clone()
        yield NamedTensor(weight.name, local.contiguous())


def export_hf(
    directory: str,
    source: str,
    weights: Sequence[Weight],
    stream: Iterator[NamedTensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that transformers loads; collective (rank 0 writes).

    Everything of ``source`` but its weights is copied. The directory appears under its name only
    when it is complete, and replaces an older export, but no directory of another kind. Raises on
    every rank when writing fails.
    """
    final = Path(directory)
    staging = final.with_name(final.name + ".tmp")
    error: Exception | None = None
    writer = _ShardWriter(staging, weights, shard_bytes) if distributed.rank() == 0 else None
    try:
        if writer is not None:
            _check_replaceable(final)
            _copy_side_files(Path(source), staging, {weight.dtype for weight in weights})
    except OSError as caught:
        error = caught
    for item in stream:
        # After a failure the stream is still drained: the other ranks gather with this one.
        if writer is not None and error is None:
            try:
                writer.add(item)
            except (OSError, SafetensorError) as caught:
                error = caught
    if writer is not None and error is None:
        try:
            writer.close()
            _replace(staging, final)
        except (OSError, SafetensorError) as caught:
            error = caught
    if error is not None:
        shutil.rmtree(staging, ignore_errors=True)
    distributed.raise_together(error, f"export to {directory}")


class _ShardWriter:
    """Groups tensors into files whose number is known beforehand, as their names need."""

    def __init__(self, folder: Path, weights: Sequence[Weight], shard_bytes: int) -> None:
        self._folder = folder
        self._file_of: dict[str, int] = {}
        self._total = sum(weight.num_bytes for weight in weights)
        filled = number = 0
        for weight in weights:
            if filled and filled + weight.num_bytes > shard_bytes:
                filled, number = 0, number + 1
            filled += weight.num_bytes
            self._file_of[weight.name] = number
        self._num_files = number + 1
        self._current = 0
        self._held: dict[str, Tensor] = {}

    def add(self, item: NamedTensor) -> None:
        if self._file_of[item.name] != self._current:
            self._flush()
            self._current = self._file_of[item.name]
        self._held[item.name] = item.tensor.cpu()

    def close(self) -> None:
        self._flush()
        if self._num_files > 1:
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": {name: self._file(n) for name, n in self._file_of.items()},
            }
            text = json.dumps(index, indent=1)
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._held, self._folder / self._file(self._current), {"format": "pt"})
        self._held = {}

    def _file(self, number: int) -> str:
        if self._num_files == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{self._num_files:05d}.safetensors"


def _check_replaceable(final: Path) -> None:
    other = final.is_dir() and any(final.iterdir()) and not (final / "config.json").is_file()
    if other:
        raise FileExistsError(f"{final} is not empty and no Hugging Face directory: not replaced")


def _copy_side_files(source: Path, staging: Path, dtypes: set[torch.dtype]) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copy2(path, staging / path.name)
    config = json.loads((staging / "config.json").read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        name = str(next(iter(dtypes))).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            if key in config and config[key] != name:
                config[key] = name
                text = json.dumps(config, indent=2)
                (staging / "config.json").write_text(text, encoding="utf-8")


def _replace(staging: Path, final: Path) -> None:
    old = final.with_name(final.name + ".old")
    if final.exists():
        # What a killed export left there would stop every later one.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staging.rename(final)
    shutil.rmtree(old, ignore_errors=True)
