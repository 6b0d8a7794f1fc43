"""The whole line on a CPU with released SGLang as the engine, in both layouts."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import metrics_of

pytestmark = pytest.mark.sglang

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

LAYOUTS: dict[str, dict[str, Any]] = {
    "disaggregated": {"rollout-num-gpus": 1},
    "colocated": {"colocate": True, "actor-num-gpus-per-node": 1},
}


@pytest.mark.parametrize(
    "layout", ["disaggregated", pytest.param("colocated", marks=pytest.mark.full)]
)
def test_sglang_generates_what_is_trained_and_holds_the_trained_weights(
    layout: str, run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    omitted = ("deterministic-rollout", "rollout-num-gpus")
    flags = {k: v for k, v in base_flags.items() if k not in omitted}
    result = run_train(
        {**flags, **LAYOUTS[layout], "rollout-engine": "sglang", "run-dir": tmp_path}, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SGLang without an accelerator runs with --device cpu" in result.stdout + result.stderr
    assert "the router of the engines runs with" in result.stdout + result.stderr
    rows = [row for row in metrics_of(tmp_path) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["rollout/weight_version"] for row in rows] == [2, 3, 4]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)
