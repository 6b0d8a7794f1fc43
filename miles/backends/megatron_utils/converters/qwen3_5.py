"""Qwen3.5, dense: gated delta net in most layers, attention with an output gate in the others.

The delta net is transformers' own module inside Megatron's layer (``self_attention.linear_attn``),
so its tensors keep their names and are whole on every rank. Norm weights are offsets from one on
both sides: the model needs ``--apply-layernorm-1p``. Vision and multi-token-prediction weights are
not trained.
"""

from typing import Any

from miles.backends.megatron_utils.converters import blocks
from miles.backends.megatron_utils.converters.table import Entry

NOT_TRAINED = ("model.visual.", "mtp.")

_DELTA_NET = (
    "dt_bias",
    "A_log",
    "conv1d.weight",
    "norm.weight",
    "out_proj.weight",
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "in_proj_b.weight",
    "in_proj_a.weight",
)


def entries(config: Any) -> list[Entry]:
    """Of a checkpoint that holds the text model alone."""
    return _entries(config, "model.")


def entries_with_vision(config: Any) -> list[Entry]:
    """Of a checkpoint of the vision-language model."""
    return _entries(config, "model.language_model.")


def _entries(config: Any, model: str) -> list[Entry]:
    embedding, head = blocks.embeddings(config.tie_word_embeddings, model)
    found = [embedding]
    bias = config.attention_bias
    for number, kind in enumerate(config.layer_types):
        names = blocks.Names.of_layer(number, model)
        if kind == "linear_attention":
            mine, theirs = f"{names.megatron}self_attention.linear_attn.", f"{names.hf}linear_attn."
            found += [blocks.whole(f"{mine}{name}", f"{theirs}{name}") for name in _DELTA_NET]
        else:
            found += blocks.attention(
                names,
                config,
                qkv_bias=bias,
                out_bias=bias,
                head_norms=True,
                output_gate=True,
            )
        found += blocks.gated_mlp(f"{names.megatron}mlp.", f"{names.hf}mlp.")
        found += blocks.norms(names)
    found.append(blocks.whole("decoder.final_layernorm.weight", f"{model}norm.weight"))
    return [*found, head] if head else found
