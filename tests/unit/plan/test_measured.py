"""The forecast of the trainer's allocator beside peaks of benchmarks/train_step.py, measured on one
H200 (docs/performance.md): Qwen3-0.6B shape, no Transformer Engine, no flash-attn package."""

from pathlib import Path

import pytest

from miles.plan.forecast import forecast
from miles.plan.memory import GIB
from tests.unit.plan.made_jobs import components, config_dir, job_of

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
PEAKS = [
    ("fsdp", 4096, 19.0),
    ("fsdp", 8192, 26.7),
    ("fsdp", 16_384, 42.2),
    pytest.param("megatron", 4096, 21.0, marks=pytest.mark.megatron),
    pytest.param("megatron", 8192, 30.2, marks=pytest.mark.megatron),
    pytest.param("megatron", 16_384, 48.4, marks=pytest.mark.megatron),
]


@pytest.mark.parametrize(("backend", "tokens", "gib"), PEAKS)
def test_the_forecast_is_within_a_tenth_of_measured_peaks(
    backend: str, tokens: int, gib: float, tmp_path: Path
) -> None:
    job = job_of(
        *("--train-backend", backend, "--actor-num-gpus-per-node", 1),
        *("--hf-checkpoint", config_dir(tmp_path / "model", **QWEN3_0_6B)),
        *("--prompt-data", "absent.jsonl", "--label-key", "label", "--loss-type", "sft_loss"),
        *("--rollout-batch-size", 8, "--num-rollout", 6, "--num-steps-per-rollout", 1),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", tokens),
        device_gib=139.8,
    )
    (phase,) = [phase for phase in forecast(job) if phase.name == "train"]
    assert sum(components(phase).values()) / GIB == pytest.approx(gib, rel=0.1)
