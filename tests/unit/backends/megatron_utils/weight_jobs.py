"""What the tests of weights run on trainer ranks. Tensors come back as bytes: what is compared is
compared bit by bit."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron_utils import cpu_platform

cpu_platform.install()

from miles.backends.megatron_utils.chunks import build_chunks  # noqa: E402
from miles.backends.megatron_utils.converters import Converter  # noqa: E402
from miles.backends.megatron_utils.initialize import destroy, initialize  # noqa: E402
from miles.backends.megatron_utils.shards import local_tensors  # noqa: E402
from miles.backends.megatron_utils.weights import load_hf, stream_hf  # noqa: E402
from miles.backends.training_utils.hf_files import HFFiles  # noqa: E402
from miles.config.root import MilesConfig  # noqa: E402
from miles.core import distributed, hf  # noqa: E402
from tests.unit.backends.megatron_utils.engine_jobs import make_config  # noqa: E402

Digest = tuple[str, tuple[int, ...], str]
"""dtype, shape, hash of the bytes"""


def weight_config(model: Path, *layout: str, precision: str = "fp32") -> MilesConfig:
    """Rows of padding in the vocabulary, and with more ranks more of them."""
    padding = ("--make-vocab-size-divisible-by", "40")
    switches = {name: name == precision for name in ("fp16", "fp32")}
    return make_config(model, *padding, *layout, precision=switches)


def digest(tensor: Tensor) -> Digest:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def stored(directory: Path | str) -> dict[str, Digest]:
    files = HFFiles(directory)
    return {name: digest(files.read(name)) for name in files.headers}


def loaded_and_streamed(configs: Sequence[MilesConfig]) -> list[list[tuple[str, Digest]]]:
    """For each layout what leaves the model after the checkpoint was loaded, in order."""
    found: list[list[tuple[str, Digest]]] = []
    distributed.init_process_group(timeout_minutes=2)
    for config in configs:
        found.append(_load_and_stream(config))
    return found


def _load_and_stream(config: MilesConfig) -> list[tuple[str, Digest]]:
    directory = config.rollout.hf_checkpoint
    assert directory is not None
    try:
        chunks = build_chunks(initialize(config), trainable=False)
        for tensor in local_tensors(chunks).values():
            tensor.data.fill_(torch.nan)
        converter = Converter.for_config(hf.load_config(directory))
        load_hf(chunks, converter, directory)
        stream = stream_hf(chunks, converter, HFFiles(directory), fp16=config.precision.fp16)
        owned: set[int] = {t.untyped_storage().data_ptr() for t in local_tensors(chunks).values()}
        names: list[tuple[str, Digest]] = []
        kept: list[Tensor] = []
        for item in stream:
            kept.append(item.tensor)
            address = item.tensor.untyped_storage().data_ptr()
            assert address not in owned, f"{item.name} shares its storage"
            owned.add(address)
            names.append((item.name, digest(item.tensor)))
        return names
    finally:
        destroy()


def held_after_loading(config: MilesConfig) -> dict[str, Tensor]:
    """This rank's tensors by global name."""
    directory = config.rollout.hf_checkpoint
    assert directory is not None
    distributed.init_process_group(timeout_minutes=2)
    try:
        chunks = build_chunks(initialize(config), trainable=False)
        load_hf(chunks, Converter.for_config(hf.load_config(directory)), directory)
        return {name: tensor.detach().clone() for name, tensor in local_tensors(chunks).items()}
    finally:
        destroy()


def elements_read_and_held(config: MilesConfig) -> tuple[int, int]:
    """How many numbers this rank reads from the files, and how many it holds."""
    read = 0
    original = HFFiles.read_slice

    def counting(files: HFFiles, *where: Any) -> Tensor:
        nonlocal read
        tensor = original(files, *where)
        read += tensor.numel()
        return tensor

    HFFiles.read_slice = counting
    try:
        held = held_after_loading(config)
    finally:
        HFFiles.read_slice = original
    return read, sum(tensor.numel() for tensor in held.values())
