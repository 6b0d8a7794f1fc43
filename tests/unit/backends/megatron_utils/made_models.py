"""Models that fit every layout, and their weights as the files hold them."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from scripts.made_models import make_qwen3, make_qwen3_5, make_qwen3_moe


def make_models(folder: Path) -> dict[str, Path]:
    """``dense``, ``other`` (the same with other weights) and ``tied`` (4 layers, 8 heads, 4 key
    heads), ``moe`` (4 layers, 8 experts), ``qwen3_5`` (three layers of gated delta net, one of
    attention)."""
    shape = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
    return {
        "dense": make_qwen3(folder / "dense", tied=False, **shape),
        "other": make_qwen3(folder / "other", tied=False, seed=1, **shape),
        "tied": make_qwen3(folder / "tied", tied=True, **shape),
        "moe": make_qwen3_moe(folder / "moe", num_layers=4),
        "qwen3_5": make_qwen3_5(folder / "qwen3_5"),
    }


def per_expert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers fuses the experts of a layer; its files name each alone."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
                found[f"{prefix}.experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                found[f"{prefix}.experts.{expert}.down_proj.weight"] = down
        else:
            found[name] = tensor
    return found
