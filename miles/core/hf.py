"""The only loader of Hugging Face configs and tokenizers."""

import copy
import json
from pathlib import Path
from typing import Any

from miles.core import hf_weights, places, transformers_source


class CheckpointDirError(ValueError):
    """A directory that is not a usable Hugging Face checkpoint; says what is missing."""


def check_config(path: str) -> None:
    """Raise ``CheckpointDirError`` unless ``path`` is a directory with a config that transformers
    knows."""
    folder = Path(path)
    reason = places.reason_against_reading(folder)
    if reason is not None:
        raise CheckpointDirError(reason)
    if not folder.is_dir():
        raise CheckpointDirError(f"{path!r} is not a directory; names of a hub are not fetched")
    if not (folder / "config.json").is_file():
        raise CheckpointDirError(f"{path!r} has no config.json{_trained(folder)}")
    _check_model_type(folder)
    _check_sizes(path)


def check_causal(path: str) -> None:
    """Raise ``CheckpointDirError`` where transformers has no causal language model for the config.

    Left to others: a config that nothing can be made of, and one that brings its own code.
    """
    values = read_config(path)
    model_type, own_code = values.get("model_type"), values.get("auto_map")
    if isinstance(own_code, dict) and own_code.keys() & {"AutoConfig", "AutoModelForCausalLM"}:
        return
    if isinstance(model_type, str) and transformers_source.lacks_causal_class(model_type):
        raise CheckpointDirError(
            f"{Path(path) / 'config.json'} is of the model_type {model_type!r}, for which the "
            "installed transformers has no causal language model (AutoModelForCausalLM), and only "
            "those are trained; give one, such as a qwen3 or llama"
        )


def check_directory(path: str) -> None:
    """Raise ``CheckpointDirError`` unless ``path`` holds config, tokenizer and whole weights."""
    check_config(path)
    folder = Path(path)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointDirError(f"{path!r} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise CheckpointDirError(f"{path!r} has no tokenizer (tokenizer.json)")
    _check_tokenizer(folder)
    _check_weights(folder)


def _trained(folder: Path) -> str:
    """What the directory is instead, where a trainer saved it, and how it becomes a model."""
    for kind, converter, patterns in _TRAINERS:
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return (
                f"; it looks like a training checkpoint ({kind}) or one step of it: --load of that "
                f"backend takes the directory that holds its steps, and {converter} makes a "
                "Hugging Face directory of it"
            )
    return ""


_TRAINERS = (
    (
        "torch_dist, the Megatron backend's",
        "tools/convert_torch_dist_to_hf.py",
        ("iter_*/*.distcp", "release/*.distcp", "*.distcp"),
    ),
    (
        "the FSDP backend's",
        "tools/convert_fsdp_to_hf.py",
        ("iter_*/model/*.distcp", "model/*.distcp"),
    ),
    ("of an unknown kind", "a tool of docs/conversion.md", ("iter_*", ".metadata")),
)
"""Name, converter and files of each backend's checkpoints: their directory, or one step of it."""


def read_config(path: str) -> dict[str, Any]:
    """The keys of ``config.json`` as they stand there, which needs no transformers."""
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointDirError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointDirError(f"{file} holds no JSON object")
    return values


def _check_model_type(folder: Path) -> None:
    """transformers can make a config of it. A checkpoint may bring its own code for that."""
    values = read_config(str(folder))
    own_code = values.get("auto_map")
    if isinstance(own_code, dict) and "AutoConfig" in own_code:
        return
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointDirError(f"{folder / 'config.json'} names no model_type")
    if model_type not in transformers_source.listed_model_types() and not _is_known_to_transformers(
        model_type
    ):
        raise CheckpointDirError(
            f"{folder / 'config.json'} is of the model_type {model_type!r}, which the installed "
            "transformers does not know; correct it, or install a version that does"
        )
    if transformers_source.doubtful_keys(values):
        # It takes torch's seconds, which a config that reads like its class is spared.
        load_config(str(folder))


_NEVER_EMPTY = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)


def _check_sizes(path: str) -> None:
    """No model is without these, as far as ``config.json`` itself states them."""
    sizes = stated_model(path)
    empty = [
        f"{name} {size}"
        for name in _NEVER_EMPTY
        if isinstance(size := sizes.get(name), int) and size < 1
    ]
    if empty:
        raise CheckpointDirError(
            f"{Path(path) / 'config.json'} says {', '.join(empty)}: each must be at least 1"
        )


def _is_known_to_transformers(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _check_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointDirError(f"{file} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointDirError(f"{file} holds no JSON object")
        if name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            raise CheckpointDirError(
                f"{file} has no 'model', so it is no tokenizer; copy that of the checkpoint again"
            )


def _check_weights(folder: Path) -> None:
    missing = hf_weights.missing_file(folder)
    if missing is not None:
        raise CheckpointDirError(missing)
    from safetensors import SafetensorError

    shapes: dict[str, hf_weights.Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= hf_weights.read_shapes(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointDirError(f"{file} is damaged or cut short: {error}") from error
    _check_fit(str(folder), shapes)


def _check_fit(path: str, shapes: dict[str, hf_weights.Shape]) -> None:
    """The weights are of the model that ``config.json`` describes, as far as that is quickly told.

    Those of a quantized one have shapes of their own.
    """
    if "quantization_config" in read_config(path):
        return
    text = _stated_text_config(path)
    reason = hf_weights.other_layers(shapes, text)
    if reason is None and hf_weights.raises_doubt(shapes, text):
        found = hf_weights.misfits(shapes, load_config(path))
        reason = f"its weights do not fit: {'; '.join(found[:3])}" if found else None
    if reason is not None:
        raise CheckpointDirError(f"{path!r}: {reason}; give the config.json of these weights")


def load_config(path: str) -> Any:
    """The transformers config of a checkpoint directory.

    Raises ``CheckpointDirError`` for values that its class refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        text = " ".join(str(error).split())
        raise CheckpointDirError(
            f"{Path(path) / 'config.json'} makes no model ({text}); correct it"
        ) from error


def architecture(config: Any) -> str:
    """The first architecture of a transformers config; empty when it names none."""
    return next(iter(config.architectures or ()), "")


def text_config(config: Any) -> Any:
    """The text part of a transformers config; the config itself where that is all there is.

    Whether the embeddings are tied is what the whole model says: transformers ties by that.
    """
    text = config.get_text_config()
    if text is config:
        return text
    text = copy.copy(text)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def padding_id(config: Any) -> int | None:
    """The token of a transformers config whose embedding is not trained as an input."""
    text = config.get_text_config()
    token = getattr(text, "pad_token_id", None)
    if not isinstance(token, int):
        return None
    # As torch.nn.Embedding counts.
    return token if token >= 0 else text.vocab_size + token


def dtype_name(path: str) -> str:
    """The torch dtype of a checkpoint directory: what its config says, else its first tensor's."""
    dtype = load_config(path).get_text_config().dtype
    if dtype is None:
        from safetensors import safe_open

        file = min(Path(path).glob("*.safetensors"))
        with safe_open(file, framework="pt") as tensors:
            dtype = tensors.get_tensor(next(iter(tensors.keys()))).dtype
    return str(dtype).removeprefix("torch.")


def tensor_names(path: str) -> frozenset[str]:
    """Names in the safetensors files of a directory; empty when it has none."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def load_tokenizer(path: str, chat_template_path: str | None = None) -> Any:
    """The tokenizer of a checkpoint directory, with another chat template when given.

    Raises ``CheckpointDirError`` for files that make none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except Exception as error:  # what the tokenizers library raises is bare Exception
        raise CheckpointDirError(f"{path!r} has no usable tokenizer: {error}") from error
    if chat_template_path is not None:
        tokenizer.chat_template = read_chat_template(chat_template_path)
    return tokenizer


def read_chat_template(path: str) -> str:
    """The text of a template's file. Raises ``OSError`` or ``UnicodeDecodeError``."""
    return Path(path).read_text(encoding="utf-8")


def stated_context_length(path: str) -> int | None:
    """``context_length`` as far as ``config.json`` itself states it."""
    values = _stated_text_config(path)
    length = values.get("max_position_embeddings", values.get("n_positions"))
    return length if isinstance(length, int) else None


def stated_vocabulary_size(path: str) -> int | None:
    """``vocabulary_size`` as far as ``config.json`` itself states it."""
    size = _stated_text_config(path).get("vocab_size")
    return size if isinstance(size, int) else None


def stated_model(path: str) -> dict[str, str | int]:
    """What tells a model from others, as far as ``config.json`` itself states it: its type,
    whether its embeddings are tied, and the sizes of its text part under one name each, whatever
    the family calls them."""
    values, text = read_config(path), _stated_text_config(path)
    model_type = values.get("model_type")
    stated: dict[str, str | int] = {"model_type": model_type} if isinstance(model_type, str) else {}
    tied = values.get("tie_word_embeddings")
    if isinstance(tied, bool):
        stated["tie_word_embeddings"] = tied
    for name, keys in _SIZES.items():
        size = next((text[key] for key in keys if text.get(key) is not None), None)
        if isinstance(size, int):
            stated[name] = size
    return stated


_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "vocab_size": ("vocab_size",),
}
"""Name -> keys of ``config.json``. What a checkpoint has stored under a name must stay readable."""


def _stated_text_config(path: str) -> dict[str, Any]:
    values = read_config(path)
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def context_length(config: Any) -> int | None:
    """Longest position the model was made for; ``None`` when the config does not say."""
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    return int(length) if length is not None else None


def vocabulary_size(config: Any) -> int | None:
    """Number of token ids that the model embeds; ``None`` when the config does not say."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    return int(size) if size is not None else None
