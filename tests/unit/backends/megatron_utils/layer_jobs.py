"""One transformer layer on one or two ranks, and small pieces that tests of the platform share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import silu

LENGTH = 16
BOUNDS = (0, 4, 12, 16)
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "one_packed": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "cp2_packed": {"context_parallel_size": 2},
    "cp2_recomputed_packed": {"context_parallel_size": 2},
}


@contextmanager
def parallel(**sizes: int) -> Iterator[None]:
    """Megatron's process groups, for the time of one job."""
    from miles.backends.megatron_utils import cpu_platform
    from miles.core import distributed

    cpu_platform.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    distributed.init_process_group(timeout_minutes=1)
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def make_config(**changes: Any) -> Any:
    """A tiny Qwen3 in fp32, weights drawn on the host: the same ones in every layout."""
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**(settings | changes))


def run_layer(layout: str) -> dict[str, Any]:
    """Output and norm gradients of the layer, for a loss that is a sum over all tokens."""
    with parallel(**LAYOUTS[layout]):
        return _run_layer(layout)


def _run_layer(layout: str) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.common.embeddings import RotaryEmbedding
    from megatron.core.transformer.spec_utils import build_module

    from miles.backends.megatron_utils.specs import block_spec

    sizes = LAYOUTS[layout]
    cp_size = sizes.get("context_parallel_size", 1)
    config = make_config(
        sequence_parallel=layout == "tp2_sp",
        pipeline_dtype=torch.float32,
        recompute_granularity="selective" if "recomputed" in layout else None,
        recompute_modules=["core_attn"],
        **sizes,
    )
    torch.manual_seed(3)
    layer = build_module(block_spec(config).layer_specs[0], config=config, layer_number=1)
    with torch.no_grad():
        for name, param in sorted(layer.named_parameters()):
            if "norm" in name:
                param.add_(torch.randn(param.shape, generator=_generator(len(name))) / 3)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    model.zero_grad_buffer()
    hidden, weights = torch.randn(2, LENGTH, 1, config.hidden_size, generator=_generator(0))
    positions, packed = _share(layout, cp_size)
    rotary = RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=1.0,
        use_cpu_initialization=True,
        cp_group=parallel_state.get_context_parallel_group(),
    )
    frequencies = rotary(LENGTH, packed_seq=packed is not None)
    output, _ = model(
        hidden[positions].clone(),
        attention_mask=None,
        rotary_pos_emb=frequencies,
        packed_seq_params=packed,
    )
    (output * weights[positions]).sum().backward()
    finalize_model_grads([model], None)
    return {
        "output": output.detach(),
        "positions": positions,
        "gradients": {
            name: param.main_grad.clone()
            for name, param in layer.named_parameters()
            if "norm" in name
        },
    }


def _share(layout: str, cp_size: int) -> tuple[torch.Tensor, Any]:
    """The positions of this rank's tokens, and how the row is packed."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from miles.backends.megatron_utils.attention import zigzag_indices

    is_packed = layout.endswith("packed")
    bounds = torch.tensor(BOUNDS if is_packed else (0, LENGTH), dtype=torch.int32)
    positions = zigzag_indices(bounds, cp_size, parallel_state.get_context_parallel_rank())
    if layout == "tp2_sp":
        positions = positions.chunk(2)[parallel_state.get_tensor_model_parallel_rank()]
    if not is_packed:
        return positions, None
    longest = int(bounds.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return positions, packed


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
