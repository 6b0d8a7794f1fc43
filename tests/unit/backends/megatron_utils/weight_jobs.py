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
from miles.config.cluster import ClusterConfig  # noqa: E402
from miles.config.data import DataConfig  # noqa: E402
from miles.config.precision import PrecisionConfig  # noqa: E402
from miles.config.rollout import RolloutConfig  # noqa: E402
from miles.config.root import MilesConfig  # noqa: E402
from miles.core import distributed, hf  # noqa: E402

Digest = tuple[str, tuple[int, ...], str]
"""dtype, shape, hash of the bytes"""


def megatron_config(model: Path, *layout: str, fp32: bool = True) -> MilesConfig:
    """A run on the Megatron backend whose architecture flags are those of ``model``."""
    return MilesConfig(
        cluster=ClusterConfig(train_backend="megatron", distributed_timeout_minutes=2),
        rollout=RolloutConfig(hf_checkpoint=str(model)),
        data=DataConfig(num_rollout=1, rollout_batch_size=8, n_samples_per_prompt=1),
        precision=PrecisionConfig(fp32=fp32),
        megatron_argv=(*architecture(hf.load_config(str(model))), *layout),
    )


def architecture(config: Any) -> list[str]:
    flags = {
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.intermediate_size,
        "num-attention-heads": config.num_attention_heads,
        "num-query-groups": config.num_key_value_heads,
        "kv-channels": config.head_dim,
        "normalization": "RMSNorm",
        "norm-epsilon": config.rms_norm_eps,
        "position-embedding-type": "rope",
        "vocab-size": config.vocab_size,
        "seq-length": 64,
        "max-position-embeddings": 64,
        "tokenizer-type": "NullTokenizer",
        # Rows of padding, and with more ranks more of them.
        "make-vocab-size-divisible-by": 40,
    }
    switches = ["group-query-attention", "swiglu", "disable-bias-linear"]
    if config.model_type.startswith("qwen3"):
        switches.append("qk-layernorm")
    if config.model_type == "qwen2":
        switches.append("add-qkv-bias")
    if not config.tie_word_embeddings:
        switches.append("untie-embeddings-and-output-weights")
    if config.model_type == "qwen3_moe":
        flags |= {
            "num-experts": config.num_experts,
            "moe-ffn-hidden-size": config.moe_intermediate_size,
            "moe-router-topk": config.num_experts_per_tok,
            "moe-layer-freq": _sparse_layers(config),
        }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [*pairs, *(f"--{name}" for name in switches)]


def _sparse_layers(config: Any) -> str:
    sparse = [int(i not in config.mlp_only_layers) for i in range(config.num_hidden_layers)]
    return str(sparse).replace(" ", "")


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
        stream = stream_hf(chunks, converter, HFFiles(directory))
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
