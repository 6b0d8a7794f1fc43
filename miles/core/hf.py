"""The only loader of Hugging Face configs and tokenizers."""

import json
from pathlib import Path
from typing import Any


class CheckpointDirError(ValueError):
    """A directory that is not a usable Hugging Face checkpoint; says what is missing."""


def check_directory(path: str) -> None:
    """Raise ``CheckpointDirError`` unless ``path`` holds config, tokenizer and whole weights."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointDirError(f"{path!r} is not a directory; names of a hub are not fetched")
    if not (folder / "config.json").is_file():
        hint = ""
        if any(folder.glob("iter_*")) or (folder / ".metadata").exists():
            hint = "; it looks like a training checkpoint, which --load takes"
        raise CheckpointDirError(f"{path!r} has no config.json{hint}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointDirError(f"{path!r} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise CheckpointDirError(f"{path!r} has no tokenizer (tokenizer.json)")
    _check_readable(folder)


def _check_readable(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    config = folder / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointDirError(f"{config} is not JSON: {error}") from error
    for file in sorted(folder.glob("*.safetensors")):
        try:
            # Reads the header, and that the file is as long as it says.
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointDirError(f"{file} is damaged or cut short: {error}") from error


def load_config(path: str) -> Any:
    """The transformers config of a checkpoint directory."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=True)


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
    """The tokenizer of a checkpoint directory, with another chat template when given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def context_length(config: Any) -> int | None:
    """Longest position the model was made for; ``None`` when the config does not say."""
    text_config = config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None)
    return int(length) if length is not None else None
