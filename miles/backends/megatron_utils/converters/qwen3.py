"""Qwen3, dense: norms of query and key over the head dimension."""

from typing import Any

from miles.backends.megatron_utils.converters import blocks
from miles.backends.megatron_utils.converters.table import Entry


def entries(config: Any) -> list[Entry]:
    """In the order of the transformers model."""
    embedding, head = blocks.embeddings(config.tie_word_embeddings)
    found = [embedding]
    bias = config.attention_bias
    for number in range(config.num_hidden_layers):
        names = blocks.Names.of_layer(number)
        found += blocks.attention(names, config, qkv_bias=bias, out_bias=bias, head_norms=True)
        found += blocks.gated_mlp(f"{names.megatron}mlp.", f"{names.hf}mlp.")
        found += blocks.norms(names)
    found.append(blocks.whole("decoder.final_layernorm.weight", "model.norm.weight"))
    return [*found, head] if head else found
