"""Bytes of activations that a transformer layer keeps for its backward pass, for each token.

Counted as in Korthikanti et al., arXiv:2205.05198, section 4, tensor by tensor, for what the two
backends compute: RMSNorm, SwiGLU, grouped queries, attention that keeps no scores. Letters in
comments: ``h`` hidden size, ``q`` and ``k`` sizes of all queries and of all keys of a token, ``i``
intermediate size, ``c`` bytes of the dtype that is computed in.
"""

from dataclasses import dataclass
from typing import Literal

from miles.plan.model import Layer, Model

Modules = Literal["transformers", "local", "transformer_engine"]
"""Whose layers: FSDP's; Megatron's without and with Transformer Engine."""

FP32 = 4
_INDEX = 8


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How a layer's tokens and tensors are divided."""

    modules: Modules
    compute_bytes: int
    tensor: int = 1
    sequence: int = 1
    """Ranks that divide what tensor parallelism leaves whole: under sequence parallelism."""
    context: int = 1
    expert_tensor: int = 1
    """Ranks that divide an expert, each of which gets the tokens of all of them."""
    scores: int = 0
    """Keys whose attention scores are kept for each token: only of eager attention."""


def layer_bytes(model: Model, layer: Layer, axes: Axes) -> float:
    """Everything that one layer keeps, per token of the rank."""
    norms = 2 * (_norm(model.hidden_size, 1, axes) + axes.compute_bytes * model.hidden_size)
    return norms / axes.sequence + _attention(model, axes) + mlp_bytes(model, layer, axes)


def input_bytes(model: Model, axes: Axes) -> float:
    """What a recomputed layer keeps: its input."""
    return axes.compute_bytes * model.hidden_size / axes.sequence


def final_bytes(model: Model, axes: Axes) -> float:
    """Final norm and the rows that the head is given, with their gradient."""
    norm = _norm(model.hidden_size, 1, axes)
    head_input = 3 * axes.compute_bytes * model.hidden_size
    return norm / axes.sequence + head_input


def working_bytes(model: Model, axes: Axes) -> float:
    """Gradients of activations in a layer's backward pass, at most: those of the products in the
    MLP, of its input, and of the residual."""
    wide = max(model.intermediate_size, model.experts_per_token * model.expert_size)
    return axes.compute_bytes * (3 * wide / axes.tensor + 2 * model.hidden_size / axes.sequence)


def mlp_bytes(model: Model, layer: Layer, axes: Axes) -> float:
    """Behind the norm's output."""
    if not layer.experts:
        return _products(axes) * axes.compute_bytes * model.intermediate_size / axes.tensor
    c, choices = axes.compute_bytes, model.experts_per_token
    shared = _products(axes) * c * model.shared_size / axes.tensor
    if axes.modules == "transformers":
        # Input and output of each chosen expert, four products, weight, places; router's scores.
        places = c + 4 * _INDEX + 1
        choice = 2 * c * model.hidden_size + 4 * c * model.expert_size + places
        return choices * choice + FP32 * model.num_experts + shared
    # The weight is multiplied before the second matrix: one product more, no output.
    products = (_products(axes) + 1) * model.expert_size
    choice = (c * model.hidden_size + 3 * _INDEX) * axes.expert_tensor + c * products
    # With as many chosen tokens on every rank: experts are divided like the tokens they get.
    return (choices * choice + 2 * FP32 * model.num_experts) / axes.sequence + shared


def _products(axes: Axes) -> int:
    """Tensors of the intermediate size that SwiGLU keeps."""
    # gate, up, silu(gate), their product. Megatron's local MLP has both of the first in one tensor
    # and a copy of the second; Transformer Engine's fused form computes silu(gate) again.
    return {"transformers": 4, "local": 5, "transformer_engine": 3}[axes.modules]


def _norm(size: int, rows: int, axes: Axes) -> float:
    """Input and its inverse deviation; without a fused kernel the input is kept in fp32, beside
    what the weight is multiplied with."""
    if axes.modules == "transformer_engine":
        return axes.compute_bytes * size + FP32 * rows
    return (FP32 + axes.compute_bytes) * size + FP32 * rows


def _attention(model: Model, axes: Axes) -> float:
    c, q, k = axes.compute_bytes, model.query_size, model.kv_size
    kept = c * (q + k) + c * q + FP32 * model.num_heads  # queries, keys, output, log-normalisers
    rotary = 0
    if model.qk_norm:
        kept += _norm(q, model.num_heads, axes) + _norm(k, model.num_kv_heads, axes)
    if axes.modules == "transformers":
        kept += c * k
        # Scores in fp32, as softmax keeps them, and rounded for the product with the values.
        kept += (FP32 + c) * model.num_heads * axes.scores
    elif axes.context == 1:
        kept += c * (q + 2 * k)  # Values are part of one tensor with queries and keys.
    else:
        # Keys and values of the whole row up to this rank's tokens, twice, in place of its keys.
        kept += 2 * c * k * (axes.context + 0.5) - c * k
    if axes.modules == "local":
        rotary = 4 * c * model.head_dim  # cosines and sines, of queries and of keys
    return kept / axes.tensor + rotary
