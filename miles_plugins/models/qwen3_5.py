"""Qwen3.5, dense: layers of gated delta net, computed by transformers' own module, among layers of
Megatron's attention with an output gate.

``--spec miles_plugins.models.qwen3_5 get_qwen3_5_spec``; the checkpoint's names and shapes are in
``miles/backends/megatron_utils/converters/qwen3_5.py``.
"""

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from miles.backends.megatron_utils.fp32_param_utils import mark_param_dtype
from miles.backends.megatron_utils.layers import RMSNorm
from miles.backends.megatron_utils.specs import block_spec
from miles.core.hf import load_config
from miles_plugins.models.hf_attention import HFAttention


class GatedDeltaNet(HFAttention):
    """Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464)."""

    def __init__(self, config: Any, layer_number: int, hf_config: Any, **others: Any) -> None:
        super().__init__(config, layer_number, **others)
        self.linear_attn = Qwen3_5GatedDeltaNet(hf_config, layer_number - 1)
        # Its kernel would read the weight past the module whose call waits for the weight where
        # --overlap-param-gather is on.
        self.linear_attn.causal_conv1d_fn = None
        # Released checkpoints have these in fp32.
        mark_param_dtype(self.linear_attn.A_log, torch.float32)
        mark_param_dtype(self.linear_attn.norm.weight, torch.float32)
        self.adopt(self.linear_attn.parameters())

    def attend(self, hidden_BxLxH: Tensor) -> Tensor:
        return self.linear_attn(hidden_BxLxH)


def get_qwen3_5_spec(
    args: argparse.Namespace, config: Any, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, as ``layer_types`` of --hf-checkpoint names them."""
    hf_config = load_config(args.hf_checkpoint).get_text_config()
    block = block_spec(config, vp_stage)
    assert block.layer_specs is not None
    first = get_transformer_layer_offset(config, vp_stage)
    kinds = hf_config.layer_types[first : first + len(block.layer_specs)]
    layers = [
        _with_delta_net(layer, hf_config) if kind == "linear_attention" else layer
        for layer, kind in zip(block.layer_specs, kinds, strict=True)
    ]
    return dataclasses.replace(block, layer_specs=layers)


def _with_delta_net(layer: ModuleSpec, hf_config: Any) -> ModuleSpec:
    parts: Any = layer.submodules
    # With Transformer Engine the norm is part of the linear layer that is replaced.
    names = {k: v for k, v in parts.sharded_state_dict_keys_map.items() if k != "input_layernorm."}
    attention = ModuleSpec(module=GatedDeltaNet, params={"hf_config": hf_config})
    return dataclasses.replace(
        layer,
        submodules=dataclasses.replace(
            parts,
            input_layernorm=RMSNorm,
            self_attention=attention,
            sharded_state_dict_keys_map=names,
        ),
    )
