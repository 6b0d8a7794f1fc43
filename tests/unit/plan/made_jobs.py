"""Directories that hold a config.json and nothing else, and the jobs of command lines on them."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from miles.plan.forecast import Phase
from miles.plan.job import Job
from miles.plan.memory import GIB
from miles.plan.read import read_job
from miles.utils.arguments import read_config

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""Of a layer: 64 x (64 + 32 + 32 + 64) + 3 x 64 x 128 = 36,864 in matrices, 2 x 64 + 2 x 8 = 144
in norms. Embedding and head: 16,384 each; final norm: 64. Together 180,864."""

RUN = (
    *("--prompt-data", "absent.jsonl", "--rm-type", "math", "--num-rollout", "10"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
    *("--rollout-max-response-len", "64", "--rollout-max-prompt-len", "64"),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "128"),
)
"""32 samples of at most 128 tokens a step, in micro-batches of 128."""


def config_dir(folder: Path, **changes: Any) -> Path:
    return _write(folder, Qwen3Config(**(SMALL | changes)))


def moe_config_dir(folder: Path, **changes: Any) -> Path:
    """8 experts of size 32 in every layer, of which each token has 2."""
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return _write(folder, Qwen3MoeConfig(**(SMALL | experts | changes)))


def job_of(*argv: object, device_gib: float = 1.0, host_gib: float | None = None) -> Job:
    config, _ = read_config([str(word) for word in argv], runs_here=False)
    host = None if host_gib is None else int(host_gib * GIB)
    return read_job(config, device_bytes=int(device_gib * GIB), host_bytes=host)


def components(phase: Phase, kind: str = "device") -> dict[str, int]:
    """Bytes by component, but for what every process has."""
    base = {"CUDA contexts", "communicators", "Python, CUDA, libraries"}
    found = {entry.component: vars(entry.bytes)[kind] for entry in phase.lines}
    return {name: size for name, size in found.items() if size and name not in base}


def _write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return folder
