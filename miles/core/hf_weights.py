"""Whether the safetensors of a Hugging Face directory are whole and of the model that its
``config.json`` describes, told from their headers: a trainer finds out minutes later."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Shape = tuple[int, ...]

_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
_FIRST_LAYER = r"model\.(?:language_model\.)?layers\.0\."
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"model\.(?:language_model\.)?embed_tokens\.weight", ("vocab_size", "hidden_size")),
    (rf"{_FIRST_LAYER}input_layernorm\.weight", ("hidden_size",)),
    (rf"{_FIRST_LAYER}mlp\.gate_proj\.weight", ("intermediate_size", "hidden_size")),
    (rf"{_FIRST_LAYER}self_attn\.q_norm\.weight", ("head_dim",)),
)
"""Tensors whose sizes most families read from these keys of ``config.json``."""


def missing_file(folder: Path) -> str | None:
    """What is wrong with the index, or which file it names that is not there; ``None``: nothing."""
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{index} is not JSON: {error}"
    table = content.get("weight_map") if isinstance(content, dict) else None
    names = set(table.values()) if isinstance(table, dict) else set[Any]()
    if not names or not all(isinstance(name, str) for name in names):
        return f"{index} has no weight_map of tensors to files"
    absent = [name for name in sorted(names) if not (folder / name).is_file()]
    if not absent:
        return None
    others = f" (and {len(absent) - 1} more of {len(names)} files)" if len(absent) > 1 else ""
    return f"{folder / absent[0]} is missing, which {INDEX} names{others}; copy the directory again"


def read_shapes(file: Path) -> dict[str, Shape]:
    """Raises ``OSError`` or ``SafetensorError`` for a file that is not as long as it says."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def other_layers(shapes: Mapping[str, Shape], text_config: Mapping[str, Any]) -> str | None:
    """That the files have fewer or more layers than the config says; ``None``: they have not.

    Layers that predict further tokens (``num_nextn_predict_layers``) may follow its own.
    """
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    stated = text_config.get("num_hidden_layers")
    if not layers or not isinstance(stated, int):
        return None
    following = text_config.get("num_nextn_predict_layers")
    most = stated + (following if isinstance(following, int) else 0)
    if stated <= max(layers) + 1 <= most:
        return None
    return f"its weights have {max(layers) + 1} layers, but config.json says {stated}"


def raises_doubt(shapes: Mapping[str, Shape], text_config: Mapping[str, Any]) -> bool:
    """Whether a tensor is of other sizes than the config's keys, as most families read them."""
    for name, shape in shapes.items():
        for pattern, keys in _PARTS:
            stated = [text_config.get(key) for key in keys]
            sizes_known = all(isinstance(size, int) for size in stated)
            if sizes_known and re.fullmatch(pattern, name) and tuple(stated) != shape:
                return True
    return False


def misfits(shapes: Mapping[str, Shape], config: Any) -> list[str]:
    """Each tensor that the model of a transformers config has with another shape.

    Builds the model without memory, which takes torch.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        except ValueError:
            return []  # No causal language model: the backends have their words for it.
    described = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return [
        f"{name} is {shape} in the files and {described[name]} by config.json"
        for name, shape in sorted(shapes.items())
        if described.get(name, shape) != shape
    ]
