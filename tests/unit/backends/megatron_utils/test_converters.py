"""The tables of the model families: names, layouts worked out by hand, exact inverses, shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from miles.backends.megatron_utils.converters import FAMILIES, Converter
from miles.backends.megatron_utils.converters.blocks import Heads, join_qkv, part_qkv
from miles.backends.megatron_utils.converters.table import (
    Entry,
    Split,
    global_name,
    pad_vocab,
    shard,
    unshard,
)
from miles.core import hf

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
}


def config_of(model: str) -> Any:
    model_type, settings = MODELS[model]
    return AutoConfig.for_model(model_type, **{**SHAPE, **settings})


@pytest.mark.parametrize("model", MODELS)
def test_the_table_names_every_tensor_of_a_saved_model_once(model: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of(model)).save_pretrained(tmp_path)
    entries = Converter.for_config(hf.load_config(str(tmp_path))).entries()
    names = [name for entry in entries for name in entry.hf]
    assert sorted(names) == sorted(hf.tensor_names(str(tmp_path)))
    assert len({entry.megatron for entry in entries}) == len(entries)


def test_a_vision_checkpoint_has_its_text_model_converted_and_the_rest_left(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2}
    vision |= {"out_hidden_size": 12, "num_position_embeddings": 4}
    config = Qwen3_5Config(text_config={**SHAPE, **DELTA_NET}, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    converter = Converter.for_config(hf.load_config(str(tmp_path)))
    names = {name for entry in converter.entries() for name in entry.hf}
    rest = hf.tensor_names(str(tmp_path)) - names
    assert names < hf.tensor_names(str(tmp_path))
    assert rest
    assert all(name.startswith(converter.not_trained) for name in rest)


@pytest.mark.parametrize("model", MODELS)
def test_joining_and_parting_are_exact_inverses(model: str) -> None:
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config_of(model))
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for entry in Converter.for_config(config_of(model)).entries():
        tensors = [random_tensor(name, shapes) for name in entry.hf]
        parts = entry.part(entry.join(tensors))
        assert len(parts) == len(tensors), entry.megatron
        for part, tensor in zip(parts, tensors, strict=True):
            assert torch.equal(part, tensor), entry.megatron


def random_tensor(name: str, shapes: dict[str, torch.Size]) -> Tensor:
    """bf16, in the shape that the model (whose experts are fused) says."""
    if name not in shapes:
        prefix, kind, _ = name.rsplit(".", 2)
        experts = prefix.rsplit(".", 1)[0]
        fused = f"{experts}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
        _, rows, columns = shapes[fused]
        return torch.randn(rows if kind == "down_proj" else rows // 2, columns).bfloat16()
    return torch.randn(shapes[name]).bfloat16()


def test_query_key_and_value_lie_group_by_group() -> None:
    query, key, value = rows(0, 4), rows(10, 2), rows(20, 2)
    joined = join_qkv([query, key, value], Heads(num_queries=2, dim=1))
    assert joined[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_the_output_gate_follows_the_queries_of_its_group() -> None:
    # transformers: query and gate of head 0 (two rows each), then of head 1, and so on.
    query, key, value = rows(0, 16), rows(20, 4), rows(30, 4)
    joined = join_qkv([query, key, value], Heads(num_queries=2, dim=2, gated=True))
    first = [0, 1, 4, 5, 2, 3, 6, 7, 20, 21, 30, 31]
    second = [8, 9, 12, 13, 10, 11, 14, 15, 22, 23, 32, 33]
    assert joined[:, 0].tolist() == first + second


def rows(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).float()[:, None].repeat(1, 3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_groups", "num_queries", "dim"), [(1, 1, 4), (3, 5, 2), (7, 1, 3)])
@pytest.mark.parametrize("tail", [(), (5,)], ids=["bias", "weight"])
def test_odd_numbers_of_heads_and_groups_survive_the_round_trip(
    num_groups: int, num_queries: int, dim: int, tail: tuple[int, ...], gated: bool
) -> None:
    heads = Heads(num_queries, dim, gated)
    query = torch.randn(num_groups * num_queries * heads.rows, *tail)
    key, value = torch.randn(num_groups * dim, *tail), torch.randn(num_groups * dim, *tail)
    parts = part_qkv(join_qkv([query, key, value], heads), heads)
    for part, tensor in zip(parts, (query, key, value), strict=True):
        assert torch.equal(part, tensor)


@pytest.mark.parametrize("model", ["llama_biases", "qwen3_moe", "qwen3_5_text"])
def test_joined_slices_of_a_checkpoint_are_the_shard_of_the_joined_tensors(model: str) -> None:
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config_of(model))
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for entry in Converter.for_config(config_of(model)).entries():
        if entry.split is Split.REPLICATED:
            continue
        tensors = [random_tensor(name, shapes) for name in entry.hf]
        dim = 1 if entry.split is Split.ROW else 0
        for rank in range(2):
            slices = [tensor.chunk(2, dim)[rank] for tensor in tensors]
            expected = shard(entry.join(tensors), entry.split, 2, rank)
            assert torch.equal(entry.join(slices), expected), entry.megatron


def test_a_rank_of_a_gated_tensor_holds_part_of_the_gate_above_part_of_the_rest() -> None:
    assert shard(rows(0, 8), Split.GATED, 2, 1)[:, 0].tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("split", Split)
def test_shards_put_together_are_the_tensor(split: Split, size: int) -> None:
    tensor = torch.randn(16, 8)
    assert torch.equal(unshard([shard(tensor, split, size, r) for r in range(size)], split), tensor)


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dimension 0 of \(6, 3\) does not divide by 4"):
        shard(rows(0, 6), Split.COLUMN, 4, 0)


def test_a_vocabulary_is_padded_with_zeros() -> None:
    padded = pad_vocab(rows(1, 2), 4)
    assert padded[:, 0].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(
    ("local", "whole"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("module.module.output_layer.weight", "output_layer.weight"),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            "decoder.layers.11.self_attention.linear_qkv.weight",
        ),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.10.input_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.10.pre_mlp_layernorm.weight",
        ),
        (
            "module.decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.12.mlp.experts.local_experts.23.linear_fc2.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.linear_fc1.weight3",
            "decoder.layers.12.mlp.experts.local_experts.23.linear_fc1.weight",
        ),
        (
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.10.mlp.shared_experts.linear_fc1.weight",
        ),
    ],
)
def test_local_names_become_global_ones(local: str, whole: str) -> None:
    assert global_name(local, layer_offset=10, expert_offset=20) == whole


def test_an_unknown_family_is_refused_with_those_that_exist() -> None:
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(ValueError, match=r"'gpt2' has no converter.*llama.*qwen3_moe"):
        Converter.for_config(config)


def test_tied_embeddings_are_one_entry_for_both_ends_of_the_pipeline() -> None:
    entries = Converter.for_config(config_of("llama_tied")).entries()
    (embedding,) = [entry for entry in entries if entry.split is Split.VOCAB]
    assert embedding.tied == ("output_layer.weight",)
    assert embedding.aliases == ("lm_head.weight",)


def test_every_family_has_a_test() -> None:
    assert FAMILIES.keys() == {model_type for model_type, _ in MODELS.values()} | {"qwen3_5"}


def entry_named(name: str, entries: list[Entry]) -> Entry:
    return next(entry for entry in entries if entry.megatron == name)


def test_only_experts_are_marked_as_such() -> None:
    entries = list(Converter.for_config(config_of("qwen3_moe")).entries())
    fc1 = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"
    assert entry_named(fc1, entries).expert == 2
    assert entry_named("decoder.layers.0.mlp.router.weight", entries).expert is None
    assert entry_named("decoder.layers.1.mlp.linear_fc1.weight", entries).expert is None
