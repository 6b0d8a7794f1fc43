"""Checkpoints into the shards of every layout and out of them again, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from scripts.made_models import make_qwen3, make_qwen3_moe
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.weight_jobs import (
    digest,
    elements_read_and_held,
    held_after_loading,
    loaded_and_streamed,
    stored,
    weight_config,
)

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
TP4 = ("--tensor-model-parallel-size", "4", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
PP4 = ("--pipeline-model-parallel-size", "4")
VPP2 = ("--num-layers-per-virtual-pipeline-stage", "1")
EP2 = ("--expert-model-parallel-size", "2")
EP4 = ("--expert-model-parallel-size", "4")
ETP1 = ("--expert-tensor-parallel-size", "1")
ETP2 = ("--expert-tensor-parallel-size", "2")

DENSE: dict[str, tuple[str, ...]] = {
    "dp4": (),
    "tp2": TP2,
    "tp4_more_than_groups": TP4,
    "pp4": PP4,
    "tp2_pp2": (*TP2, *PP2),
    "pp2_vpp2": (*PP2, *VPP2),
}
MOE: dict[str, tuple[str, ...]] = {
    "ep4": EP4,
    "ep2_pp2": (*EP2, *PP2),
    "tp2_etp2_ep2": (*TP2, *ETP2, *EP2),
    "tp2_etp1_ep4": (*TP2, *ETP1, *EP4),
    "tp2_etp1_pp2": (*TP2, *ETP1, *PP2),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    small: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**small, head_dim=8)).bfloat16().save_pretrained(folder / "llama")
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**small, head_dim=8, tie_word_embeddings=True))
    for name, parameter in qwen2.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    qwen2.save_pretrained(folder / "qwen2")
    return {
        "llama": folder / "llama",
        "qwen2": folder / "qwen2",
        "tied": make_qwen3(folder / "tied", hidden_size=32, num_layers=4),
        "moe": make_qwen3_moe(
            folder / "moe",
            hidden_size=32,
            expert_size=16,
            num_layers=4,
            dense_layers=(2,),
            dtype=torch.bfloat16,
        ),
    }


@pytest.fixture(scope="module")
def mixed(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16, but a norm and one expert's gate in fp32 with values that bf16 cannot hold."""
    path = tmp_path_factory.mktemp("mixed") / "moe"
    shutil.copytree(made["moe"], path)
    tensors = load_file(path / "model.safetensors")
    for name in ("layers.0.input_layernorm.weight", "layers.1.mlp.experts.5.gate_proj.weight"):
        tensors[f"model.{name}"] = tensors[f"model.{name}"].float() + 1e-6
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(("model", "layouts"), [("tied", DENSE), ("moe", MOE)])
def test_what_was_loaded_in_any_layout_leaves_as_the_checkpoint_holds_it(
    megatron_ranks: Ranks, made: dict[str, Path], model: str, layouts: dict[str, tuple[str, ...]]
) -> None:
    configs = [weight_config(made[model], *layout) for layout in layouts.values()]
    expected = stored(made[model])
    found = megatron_ranks.run_well(loaded_and_streamed, configs, num_ranks=4)
    for rank, answers in enumerate(found):
        for layout, streamed in zip(layouts, answers, strict=True):
            assert dict(streamed) == expected, (layout, rank)
            assert len(streamed) == len(expected), (layout, rank)
            assert [name for name, _ in streamed] == [name for name, _ in answers[0]]


def test_biases_and_tied_and_untied_heads_survive(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    names = ("llama", "qwen2")
    configs = [weight_config(made[name], *TP2, *PP2) for name in names]
    for answers in megatron_ranks.run_well(loaded_and_streamed, configs, num_ranks=4):
        for name, streamed in zip(names, answers, strict=True):
            assert dict(streamed) == stored(made[name])


def test_each_tensor_keeps_the_dtype_of_its_own(megatron_ranks: Ranks, mixed: Path) -> None:
    configs = [weight_config(mixed, *TP2, *ETP2, *EP2)]
    for (streamed,) in megatron_ranks.run_well(loaded_and_streamed, configs, num_ranks=4):
        assert dict(streamed) == stored(mixed)


def test_a_bf16_model_gives_a_bf16_checkpoint_back(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    configs = [weight_config(made["moe"], *PP2, *EP2, precision="bf16")]
    for (streamed,) in megatron_ranks.run_well(loaded_and_streamed, configs, num_ranks=4):
        assert dict(streamed) == stored(made["moe"])


def test_an_fp16_run_sends_what_its_engines_compute_in(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    tensors = load_file(made["moe"] / "model.safetensors")
    expected = {name: digest(tensor.half()) for name, tensor in tensors.items()}
    configs = [weight_config(made["moe"], *PP2, *EP2, precision="fp16")]
    for (streamed,) in megatron_ranks.run_well(loaded_and_streamed, configs, num_ranks=4):
        assert dict(streamed) == expected


def test_a_tied_tensor_goes_under_the_name_of_the_checkpoint(
    megatron_ranks: Ranks, made: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(made["tied"], path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for (streamed,) in megatron_ranks.run_well(
        loaded_and_streamed, [weight_config(path, *PP2)], num_ranks=4
    ):
        assert dict(streamed) == stored(path)


def test_each_rank_holds_its_rows_of_the_vocabulary_and_zeros_beyond(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    embedding = load_file(made["tied"] / "model.safetensors")["model.embed_tokens.weight"]
    # 96 tokens in 4 x 40 rows.
    padded = torch.cat([embedding, torch.zeros(64, 32)])
    held = megatron_ranks.run_well(
        held_after_loading, weight_config(made["tied"], *TP4), num_ranks=4
    )
    for rank, tensors in enumerate(held):
        name = "embedding.word_embeddings.weight"
        assert torch.equal(tensors[name], padded[40 * rank : 40 * (rank + 1)])


def test_both_ends_of_a_pipeline_hold_a_tied_embedding(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    held = megatron_ranks.run_well(
        held_after_loading, weight_config(made["tied"], *PP4), num_ranks=4
    )
    first, last = held[0], held[3]
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_a_rank_reads_what_it_holds_and_no_more(
    megatron_ranks: Ranks, made: dict[str, Path]
) -> None:
    config = weight_config(made["moe"], *TP2, *ETP2, *EP2)
    for read, held in megatron_ranks.run_well(elements_read_and_held, config, num_ranks=4):
        assert read <= held


FAULTS = {
    "missing": ("CheckpointDirError", "has no tensor named model.layers.1.mlp.up_proj.weight"),
    "surplus": ("CheckpointDirError", "no place for: model.layers.1.mlp.up_proj.bias"),
    "shape": ("ValueError", r"make \(80, 32\) for decoder.layers.1.mlp.linear_fc1.weight"),
    "damaged": ("CheckpointDirError", "model.safetensors is damaged"),
    "short": ("ValueError", "the model has no parameter for: model.layers.2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(
    megatron_ranks: Ranks, made: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(made["tied"], path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    config = weight_config(path, *PP2)
    if fault == "missing":
        del tensors[name]
    elif fault == "surplus":
        tensors[name.replace("weight", "bias")] = torch.zeros(128)
    elif fault == "shape":
        for kind in ("up_proj", "gate_proj"):
            tensors[name.replace("up_proj", kind)] = torch.zeros(40, 32)
    save_file(tensors, file, {"format": "pt"})
    if fault == "damaged":
        file.write_bytes(file.read_bytes()[:-5000])
    if fault == "short":
        config = weight_config(path, *PP2, "--num-layers", "2")
    kind, says = FAULTS[fault]
    for error in megatron_ranks.run(held_after_loading, config, num_ranks=4):
        assert isinstance(error, Exception)
        with pytest.raises(Exception, match=says):
            raise error
        assert kind in f"{type(error).__name__} {error}"
