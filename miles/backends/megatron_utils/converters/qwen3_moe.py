"""Qwen3-MoE: the attention of Qwen3, routed experts, dense layers where the config says so."""

from typing import Any

from miles.backends.megatron_utils.converters import blocks
from miles.backends.megatron_utils.converters.table import Entry


def entries(config: Any) -> list[Entry]:
    """In the order of the transformers model, each expert's matrices together."""
    embedding, head = blocks.embeddings(config.tie_word_embeddings)
    found = [embedding]
    bias = config.attention_bias
    for number in range(config.num_hidden_layers):
        names = blocks.Names.of_layer(number)
        found += blocks.attention(names, config, qkv_bias=bias, out_bias=bias, head_norms=True)
        if _is_sparse(config, number):
            found += blocks.experts(names, config.num_experts)
        else:
            found += blocks.gated_mlp(f"{names.megatron}mlp.", f"{names.hf}mlp.")
        found += blocks.norms(names)
    found.append(blocks.whole("decoder.final_layernorm.weight", "model.norm.weight"))
    return [*found, head] if head else found


def _is_sparse(config: Any, layer: int) -> bool:
    dense = layer in config.mlp_only_layers or config.num_experts == 0
    return not dense and (layer + 1) % config.decoder_sparse_step == 0
