"""Tiny random checkpoints of several model families, with the character tokenizer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.made_models import make_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    model_type: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


FAMILIES = (
    Family("qwen3", "qwen3"),
    Family("llama", "llama", {"tie_word_embeddings": False}),
    Family("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Family("mistral_window", "mistral", {"sliding_window": 5}),
    Family(
        "qwen3_mixed_window",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    Family("dropout", "llama", {"attention_dropout": 0.5}),
    Family(
        "qwen3_moe",
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
)
ROUTER_BIAS = Family(
    # A router that adds a buffer to its scores, which decides between experts.
    "router_bias",
    "glm4_moe_lite",
    {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "tie_word_embeddings": False,
    },
)
CHANGES_LOGITS = (Family("granite", "granite", {"logits_scaling": 4.0}),)
LEAKS = (
    # A recurrent layer, whose state transformers carries across documents of a row.
    Family(
        "recurrent",
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "recurrent"]},
    ),
)


def make_family(folder: Path, family: Family, seed: int = 3, scale: float = 0.3) -> Path:
    """Random weights, large enough for logits that differ clearly; fp32."""
    config = AutoConfig.for_model(family.model_type, **{**_SHAPE, **family.settings})
    path = folder / family.name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=scale)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    # As in released models: large beside the differences that decide.
                    buffer.normal_(mean=8.0, std=0.1)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


_LISTED_EXPERTS = """
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class ListedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(config.num_experts))

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](flat[rows]) * weights[rows, None])
        return out.view_as(hidden)


class ListedExpertsForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = ListedExperts(config)
        self.post_init()
"""


def make_listed_experts(folder: Path, num_experts: int) -> Path:
    """A model whose own code holds each expert in a module, and calls those that a token chose."""
    settings = {"num_experts": num_experts, "intermediate_size": 16, "tie_word_embeddings": False}
    path = make_family(folder, Family("listed_experts", "llama", settings))
    (path / "modeling_listed.py").write_text(_LISTED_EXPERTS)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_listed.ListedExpertsForCausalLM"}
    config["architectures"] = ["ListedExpertsForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        described = AutoConfig.from_pretrained(path, trust_remote_code=True)
        model: Any = AutoModelForCausalLM.from_config(described, trust_remote_code=True)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
    save_file(
        {key: tensor.contiguous() for key, tensor in model.state_dict().items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path
