"""Phi-3 and Phi-4 with plain RoPE: a Llama whose checkpoint fuses the three projections of
attention, and the two of the gated MLP, into one tensor each.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron_utils.architecture import (
    Flags,
    UnknownArchitecture,
    require,
    transformer_flags,
)
from miles.backends.megatron_utils.bridge import Bridge
from miles.backends.megatron_utils.converters import Family, blocks
from miles.backends.megatron_utils.converters.blocks import Heads, join_qkv, part_qkv
from miles.backends.megatron_utils.converters.table import Entry, Split


def flags(config: Any) -> Flags:
    """Raises ``UnknownArchitecture`` for a sliding window and for scaled RoPE."""
    require(config, "sliding_window", None)
    percent = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if percent != 1.0:
        raise UnknownArchitecture(f"partial_rotary_factor {percent} is not supported (only 1.0)")
    return transformer_flags(config)


def entries(config: Any) -> list[Entry]:
    """In the order of the transformers model."""
    embedding, head = blocks.embeddings(config.tie_word_embeddings)
    found = [embedding]
    for number in range(config.num_hidden_layers):
        names = blocks.Names.of_layer(number)
        found += _attention(names, config)
        found.append(
            blocks.whole(
                f"{names.megatron}mlp.linear_fc1.weight",
                f"{names.hf}mlp.gate_up_proj.weight",
                Split.GATED,
                units=1,
            )
        )
        mine, theirs = f"{names.megatron}mlp.linear_fc2.weight", f"{names.hf}mlp.down_proj.weight"
        found.append(blocks.whole(mine, theirs, Split.ROW))
        found += blocks.norms(names)
    found.append(blocks.whole("decoder.final_layernorm.weight", "model.norm.weight"))
    return [*found, head] if head else found


def _attention(names: blocks.Names, config: Any) -> list[Entry]:
    mine, theirs = f"{names.megatron}self_attention.", f"{names.hf}self_attn."
    groups, dim = config.num_key_value_heads, blocks.head_dim(config)
    heads = Heads(config.num_attention_heads // groups, dim)
    rows = (config.num_attention_heads * dim, groups * dim, groups * dim)
    return [
        Entry(
            megatron=f"{mine}linear_qkv.weight",
            hf=(f"{theirs}qkv_proj.weight",),
            split=Split.COLUMN,
            join=partial(_by_group, rows=rows, heads=heads),
            part=partial(_by_projection, heads=heads),
            # Rows of the fused tensor are no shard of it: it is read whole.
            units=1,
        ),
        blocks.whole(f"{mine}linear_proj.weight", f"{theirs}o_proj.weight", Split.ROW),
    ]


def _by_group(tensors: Sequence[Tensor], rows: tuple[int, int, int], heads: Heads) -> Tensor:
    (fused,) = tensors
    return join_qkv(fused.split(rows), heads)


def _by_projection(tensor: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    return (torch.cat(part_qkv(tensor, heads)),)


BRIDGE = Bridge(
    model_types=("phi3",),
    flags=flags,
    family=Family(entries),
    spec="miles_plugins.models.phi3 get_phi3_spec",
)
