"""Bytes that a transformer layer of Megatron keeps for its backward pass, counted on one or two
ranks. Importing this module imports no Megatron: the ranks do that in the job."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

TOKENS = 96


def saved_bytes(run: Callable[[], object], module: nn.Module) -> int:
    """Bytes of the storages that autograd keeps of ``run``, each once; parameters and buffers of
    ``module`` are no activations."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def megatron_layer_bytes(axes: dict[str, int], changes: dict[str, Any]) -> float:
    """Of one more layer, per token that the rank is given."""
    with parallel(**axes):
        return (_block_bytes(axes, changes, 2) - _block_bytes(axes, changes, 1)) / TOKENS


def _block_bytes(axes: dict[str, int], changes: dict[str, Any], num_layers: int) -> int:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_block import TransformerBlock

    from miles.backends.megatron_utils.specs import block_spec

    groups: Any = parallel_state
    tp = axes.get("tensor_model_parallel_size", 1)
    cp = axes.get("context_parallel_size", 1)
    config = make_config(
        num_layers=num_layers, bf16=True, params_dtype=torch.bfloat16, **{**axes, **changes}
    )
    block = TransformerBlock(config=config, spec=block_spec(config))
    split = tp if config.sequence_parallel else 1
    hidden = torch.randn(TOKENS // split, 1, config.hidden_size, dtype=torch.bfloat16)
    hidden.requires_grad_()
    rotary = RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=1.0,
        use_cpu_initialization=True,
        cp_group=groups.get_context_parallel_group(),
    )
    bounds = torch.tensor([0, TOKENS * cp], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=TOKENS * cp,
        max_seqlen_kv=TOKENS * cp,
    )
    frequencies = rotary(TOKENS * cp, packed_seq=True)
    return saved_bytes(
        lambda: block(
            hidden, attention_mask=None, rotary_pos_emb=frequencies, packed_seq_params=packed
        ),
        block,
    )
