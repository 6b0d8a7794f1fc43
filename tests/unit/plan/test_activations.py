"""What a layer keeps for its backward pass, held against what autograd keeps on a CPU.

There attention runs on other kernels than on a GPU, which save the same tensors.
"""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from miles.backends.fsdp_utils import attention
from miles.plan.activations import Axes, input_bytes, layer_bytes, mlp_bytes
from miles.plan.model import Model, describe
from tests.ranks import Ranks
from tests.unit.plan.activation_jobs import TOKENS, megatron_layer_bytes, saved_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
}


def made(family: str, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    model_class, config_class, more = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES, **more, num_hidden_layers=num_layers)
    return model_class(config).to(dtype).train()


def described(family: str) -> Model:
    module = made(family, 2)
    return describe(module, module.config, torch.bfloat16)


def kept_by_transformers(
    family: str, dtype: torch.dtype, implementation: str | None, *, checkpointed: bool = False
) -> float:
    """Bytes a token of one more layer of the model, as the FSDP backend runs it."""
    counts: list[int] = []
    for num_layers in (1, 2):
        module = made(family, num_layers, dtype)
        if implementation is not None:
            module.set_attn_implementation(implementation)
        attention.install(module, implementation, dtype)
        if checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        module.lm_head.forward = lambda hidden: hidden[:, :0]
        bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
        documents = attention.packed_arguments(attention.implementation(module), bounds, TOKENS)
        inputs = {
            "input_ids": torch.arange(TOKENS)[None] % SIZES["vocab_size"],
            "position_ids": torch.arange(TOKENS)[None],
        }
        counts.append(
            saved_bytes(
                lambda module=module, inputs=inputs, documents=documents: module(
                    **inputs, **documents, use_cache=False
                ),
                module,
            )
        )
    return (counts[1] - counts[0]) / TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_transformers_keeps_what_is_forecast(family: str, dtype: torch.dtype) -> None:
    model = described(family)
    axes = Axes(modules="transformers", compute_bytes=dtype.itemsize)
    forecast = layer_bytes(model, model.layers[0], axes)
    assert forecast == pytest.approx(kept_by_transformers(family, dtype, None), rel=0.02)


def test_eager_attention_keeps_its_scores() -> None:
    model = described("qwen3")
    axes = Axes(modules="transformers", compute_bytes=2, scores=TOKENS)
    # transformers repeats keys and values for each query head: c x (q - k) twice.
    repeated = 2 * 2 * (model.query_size - model.kv_size)
    forecast = layer_bytes(model, model.layers[0], axes) + repeated
    kept = kept_by_transformers("qwen3", torch.bfloat16, "eager")
    assert forecast == pytest.approx(kept, rel=0.1)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    model = described("qwen3")
    axes = Axes(modules="transformers", compute_bytes=2)
    kept = kept_by_transformers("qwen3", torch.bfloat16, None, checkpointed=True)
    assert input_bytes(model, axes) == kept == 128


MEGATRON: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_hidden_size": 176,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 16,
}
MEGATRON_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
}
TP2 = {"tensor_model_parallel_size": 2}
UNIFORM = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        ("qwen3", {}, {}),
        ("llama", {}, {"qk_layernorm": False}),
        ("qwen2", {}, {"qk_layernorm": False, "add_qkv_bias": True}),
        ("qwen3", TP2, {}),
        ("qwen3", TP2, {"sequence_parallel": True}),
        ("qwen3_moe", {}, MEGATRON_EXPERTS),
        ("qwen3_moe", {"expert_model_parallel_size": 2}, MEGATRON_EXPERTS),
        ("qwen3_moe", TP2, {"sequence_parallel": True} | MEGATRON_EXPERTS),
        (
            "qwen3_moe",
            TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            {"sequence_parallel": True} | MEGATRON_EXPERTS,
        ),
    ],
)
def test_a_layer_of_megatron_keeps_what_is_forecast(
    family: str, sizes: dict[str, int], changes: dict[str, Any], megatron_ranks: Ranks
) -> None:
    model = described(family)
    num_ranks = 2 if sizes else 1
    kept = megatron_ranks.run_well(
        megatron_layer_bytes, sizes, MEGATRON | changes, num_ranks=num_ranks
    )
    tensor = sizes.get("tensor_model_parallel_size", 1)
    axes = Axes(
        modules="local",
        compute_bytes=2,
        tensor=tensor,
        sequence=tensor if changes.get("sequence_parallel") else 1,
        expert_tensor=sizes.get("expert_tensor_parallel_size", tensor),
    )
    forecast = layer_bytes(model, model.layers[0], axes)
    # Experts are not chosen equally often: the ranks together keep what is forecast.
    assert forecast == pytest.approx(sum(kept) / num_ranks, rel=0.02)


@pytest.mark.megatron
def test_recomputation_of_megatron_keeps_what_is_forecast(megatron_ranks: Ranks) -> None:
    model = described("qwen3")
    axes = Axes(modules="local", compute_bytes=2)
    layer = model.layers[0]

    def kept(changes: dict[str, Any]) -> float:
        return megatron_ranks.run_well(megatron_layer_bytes, {}, MEGATRON | changes, num_ranks=1)[0]

    assert kept(UNIFORM) == input_bytes(model, axes)
    assert kept(MLP) == layer_bytes(model, layer, axes) - mlp_bytes(model, layer, axes)
