"""The sizes of a model, read from its ``config.json`` alone: built on the meta device, which takes
no memory."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from miles.core import hf

COUNTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose activations are counted tensor by tensor."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERTS, _ROUTER = ".experts.", ".mlp.gate."


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters of one transformer layer."""

    matrices: int
    """What tensor parallelism splits."""
    replicated: int
    """Norms and routers, which every tensor-parallel rank has whole."""
    experts: int = 0
    """Of all experts."""

    @property
    def total(self) -> int:
        return self.matrices + self.replicated + self.experts


@dataclass(frozen=True, kw_only=True)
class Model:
    """What memory depends on."""

    hidden_size: int
    intermediate_size: int
    """Of a dense layer's MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layers: tuple[Layer, ...]
    embedding: int
    """Parameters of the input embedding, which is the head's too where they are tied."""
    head: int
    """Parameters of a head of its own, else 0."""
    others: int
    """Parameters outside the layers, embedding and head: the final norm."""
    largest_tensor: int
    """Elements of the largest parameter."""
    tensors: tuple[int, ...] = ()
    """Elements of each parameter."""
    qk_norm: bool = False
    experts_per_token: int = 0
    num_experts: int = 0
    expert_size: int = 0
    """Intermediate size of an expert."""
    shared_size: int = 0
    """Intermediate size of the expert that every token has, if there is one."""
    positions: int | None = None
    """Longest sequence that the model was made for."""
    dtype_bytes: int = 2
    """Of a weight in the checkpoint."""
    model_type: str = "qwen3"

    @property
    def num_parameters(self) -> int:
        layers = sum(layer.total for layer in self.layers)
        return layers + self.embedding + self.head + self.others

    @property
    def largest_layer(self) -> int:
        return max(layer.total for layer in self.layers)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of the keys of a token, or of its values."""
        return self.num_kv_heads * self.head_dim


def read_model(path: str) -> Model:
    """Raises ``OSError`` or ``ValueError`` where transformers cannot make the model."""
    config = hf.load_config(path)
    stored = config.get_text_config().dtype  # Building a model replaces it.
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=True
        )
    return describe(module, config, stored)


def describe(module: Any, config: Any, stored: torch.dtype | None) -> Model:
    """Of a built model (on any device), its transformers config, and the dtype of the checkpoint
    (bf16 where its config does not say)."""
    text = config.get_text_config()
    fields = text.to_dict()
    embedding = module.get_input_embeddings().weight
    output = module.get_output_embeddings()
    head = embedding if output is None else output.weight
    special = [embedding, head]
    layers, others, names = _split(module, {id(parameter) for parameter in special})
    heads = int(text.num_attention_heads)
    return Model(
        hidden_size=int(text.hidden_size),
        intermediate_size=int(text.intermediate_size),
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or text.hidden_size // heads),
        vocab_size=int(embedding.shape[0]),
        layers=layers,
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        others=others,
        largest_tensor=max(parameter.numel() for parameter in module.parameters()),
        tensors=tuple(parameter.numel() for parameter in module.parameters()),
        qk_norm=any("q_norm" in name for name in names),
        experts_per_token=int(fields.get("num_experts_per_tok") or 0),
        num_experts=int(fields.get("num_experts") or fields.get("num_local_experts") or 0),
        expert_size=int(fields.get("moe_intermediate_size") or text.intermediate_size),
        shared_size=int(fields.get("shared_expert_intermediate_size") or 0),
        positions=hf.context_length(config),
        dtype_bytes=2 if stored is None else stored.itemsize,
        model_type=str(text.model_type),
    )


def _split(module: nn.Module, special: set[int]) -> tuple[tuple[Layer, ...], int, list[str]]:
    """The layers in order, the parameters that are in none, and all names."""
    counts: dict[int, list[int]] = {}
    others = 0
    names: list[str] = []
    for name, parameter in module.named_parameters():
        names.append(name)
        found = _LAYER.search(name)
        if found is None:
            others += 0 if id(parameter) in special else parameter.numel()
            continue
        kinds = counts.setdefault(int(found[1]), [0, 0, 0])
        if _EXPERTS in name:
            kinds[2] += parameter.numel()
        else:
            kinds[parameter.dim() < 2 or _ROUTER in name] += parameter.numel()
    layers = tuple(
        Layer(matrices=matrices, replicated=replicated, experts=experts)
        for _, (matrices, replicated, experts) in sorted(counts.items())
    )
    return layers, others, names
