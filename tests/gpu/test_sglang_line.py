"""The whole line with released SGLang on accelerators: both backends, both layouts."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.made_models import make_qwen3
from tests.e2e.conftest import metrics_of

pytestmark = pytest.mark.sglang

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

TIMEOUT_S = 300
MEAN_LOG_PROB_DIFFERENCE = 0.02
"""Between two bf16 implementations of one model."""

COLOCATED = {"colocate": True}
DISAGGREGATED = {"rollout-num-gpus": 1}
TP2 = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
CHECK = {"check-weight-update-equal": True}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-colocated": (1, {"train-backend": "fsdp", **COLOCATED, **CHECK}),
    "megatron-colocated": (1, {"train-backend": "megatron", **COLOCATED, **CHECK}),
    "fsdp-disaggregated": (2, {"train-backend": "fsdp", **DISAGGREGATED, **CHECK}),
    "megatron-disaggregated": (2, {"train-backend": "megatron", **DISAGGREGATED, **CHECK}),
    "fsdp-colocated-two-engines": (
        2,
        {"train-backend": "fsdp", **COLOCATED, **CHECK, "actor-num-gpus-per-node": 2},
    ),
    "megatron-colocated-one-engine-of-two": (
        2,
        {
            "train-backend": "megatron",
            **COLOCATED,
            **CHECK,
            **TP2,
            "actor-num-gpus-per-node": 2,
            "rollout-num-gpus-per-engine": 2,
        },
    ),
}
"""Devices that a case needs, and its flags."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As narrow as the attention kernels of released wheels allow."""
    return make_qwen3(
        tmp_path_factory.mktemp("models") / "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        head_dim=64,
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="module")
def flags(model: Path, reverse_data: Path) -> dict[str, Any]:
    return {
        "actor-num-gpus-per-node": 1,
        "rollout-engine": "sglang",
        "hf-checkpoint": model,
        "prompt-data": reverse_data / "train.jsonl",
        "label-key": "label",
        "rm-type": "deterministic_random",
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 4,
        "num-steps-per-rollout": 2,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": 2048,
        "num-rollout": 3,
        "rollout-max-response-len": 24,
        "lr": 1e-3,
        "sglang-mem-fraction-static": 0.3,
        "sglang-attention-backend": "fa3",
        "sglang-sampling-backend": "pytorch",
        # Released SGLang's own failed to be captured for a model this narrow.
        "sglang-cuda-graph-backend-prefill": "disabled",
        # Several buckets, so that both segments take turns.
        "update-weight-buffer-size": 1_000_000,
    }


@pytest.mark.parametrize("case", CASES)
def test_sglang_generates_what_is_trained_and_holds_the_trained_weights(
    case: str, run_train: Runner, flags: dict[str, Any], tmp_path: Path
) -> None:
    devices, layout = CASES[case]
    if torch.accelerator.device_count() < devices:
        pytest.skip(f"{devices} accelerators are needed")
    result = run_train({**flags, **layout, "run-dir": tmp_path}, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [row for row in metrics_of(tmp_path) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["rollout/weight_version"] for row in rows] == [2, 3, 4]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
    assert max(differences) < MEAN_LOG_PROB_DIFFERENCE, differences
