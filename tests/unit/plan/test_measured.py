"""The forecast of the trainer's allocator beside peaks of benchmarks/train_step.py (0.6B),
benchmarks/offload.py (4B, and state on disk) and benchmarks/forecast.py (colocated runs), measured
on one H200 (docs/memory.md): Qwen3 shapes, no Transformer Engine, no flash-attn package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.config.offload import OffloadConfig
from miles.plan.forecast import forecast
from miles.plan.memory import GIB
from miles.plan.read import read_job
from miles.utils.arguments import read_config
from tests.unit.plan.made_jobs import components, config_dir

QWEN3_0_6B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
QWEN3_4B = {
    **QWEN3_0_6B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
STREAMED = OffloadConfig(
    offload_train=True,
    offload_train_target="disk",
    offload_train_disk_dir="absent",
    stream_optimizer_state_to_disk=True,
)
PLAIN = OffloadConfig()
PEAKS = [
    ("fsdp", QWEN3_0_6B, PLAIN, 4096, 19.0),
    ("fsdp", QWEN3_0_6B, PLAIN, 8192, 26.7),
    ("fsdp", QWEN3_0_6B, PLAIN, 16_384, 42.2),
    ("fsdp", QWEN3_0_6B, STREAMED, 1024, 8.3),
    ("fsdp", QWEN3_4B, PLAIN, 1024, 69.7),
    ("fsdp", QWEN3_4B, STREAMED, 1024, 39.8),
    ("megatron", QWEN3_0_6B, PLAIN, 4096, 21.0),
    ("megatron", QWEN3_0_6B, PLAIN, 8192, 30.2),
    ("megatron", QWEN3_0_6B, PLAIN, 16_384, 48.4),
    ("megatron", QWEN3_0_6B, STREAMED, 1024, 7.5),
    ("megatron", QWEN3_4B, PLAIN, 1024, 77.5),
]


@pytest.mark.parametrize(
    ("backend", "shape", "offload", "tokens", "gib"),
    [
        pytest.param(*peak, marks=[pytest.mark.megatron] if peak[0] == "megatron" else [])
        for peak in PEAKS
    ],
)
def test_the_forecast_is_within_a_tenth_of_measured_peaks(
    backend: str,
    shape: dict[str, Any],
    offload: OffloadConfig,
    tokens: int,
    gib: float,
    tmp_path: Path,
) -> None:
    argv = (
        *("--train-backend", backend, "--actor-num-gpus-per-node", 1),
        *("--hf-checkpoint", config_dir(tmp_path / "model", **shape)),
        *("--prompt-data", "absent.jsonl", "--label-key", "label", "--loss-type", "sft_loss"),
        *("--rollout-batch-size", 8, "--num-rollout", 6, "--num-steps-per-rollout", 1),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", tokens),
    )
    config, _ = read_config([str(word) for word in argv], runs_here=False)
    # Not by flags, which ask for engines that the trainer makes room for.
    job = read_job(replace(config, offload=offload), device_bytes=int(139.8 * GIB), host_bytes=None)
    (phase,) = [phase for phase in forecast(job) if phase.name == "train"]
    assert sum(components(phase).values()) / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("backend", "gib"),
    [
        ("fsdp", {"train": 25.7, "sync": 3.72, "save": 6.73}),
        pytest.param(
            "megatron",
            {"train": 28.98, "sync": 2.61, "save": 10.06},
            marks=pytest.mark.megatron,
        ),
    ],
)
def test_the_phases_of_a_colocated_run_are_within_a_tenth_of_measured_peaks(
    backend: str, gib: dict[str, float], tmp_path: Path
) -> None:
    argv = (
        *("--train-backend", backend, "--actor-num-gpus-per-node", 1, "--colocate"),
        *("--hf-checkpoint", config_dir(tmp_path / "model", **QWEN3_0_6B)),
        *("--prompt-data", "absent.jsonl", "--rm-type", "math", "--rollout-engine", "sglang"),
        *("--rollout-batch-size", 8, "--n-samples-per-prompt", 8, "--num-rollout", 2),
        *("--num-steps-per-rollout", 1, "--rollout-max-response-len", 1024),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 8192),
        *("--save", tmp_path / "save"),
    )
    config, _ = read_config([str(word) for word in argv], runs_here=False)
    job = read_job(config, device_bytes=int(139.8 * GIB), host_bytes=None)
    of_engines = ("engine weights", "key/value cache")
    found = {
        phase.name: sum(
            size for name, size in components(phase).items() if not name.startswith(of_engines)
        )
        / GIB
        for phase in forecast(job)
    }
    assert {name: found[name] for name in gib} == pytest.approx(gib, rel=0.1)
