"""The whole line on a CPU with released SGLang as the engine, in both layouts."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.rollout.debug_data import load_groups
from tests.e2e.conftest import BACKENDS, metrics_of, with_backend
from tests.e2e.engine_faults import servers_of

pytestmark = pytest.mark.sglang

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

LAYOUTS: dict[str, dict[str, Any]] = {
    "disaggregated": {"rollout-num-gpus": 1},
    "colocated": {"colocate": True, "actor-num-gpus-per-node": 1},
}


@pytest.mark.parametrize(
    "layout", ["disaggregated", pytest.param("colocated", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sglang_generates_what_is_trained_and_holds_the_trained_weights(
    backend: str, layout: str, run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    omitted = ("deterministic-rollout", "rollout-num-gpus")
    flags = {k: v for k, v in base_flags.items() if k not in omitted}
    # A colocated trainer has one rank.
    dimensions = with_backend({}, backend) if layout == "disaggregated" else {}
    flags = {**flags, "train-backend": backend, **dimensions, **LAYOUTS[layout]}
    result = run_train({**flags, "rollout-engine": "sglang", "run-dir": tmp_path}, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SGLang without an accelerator runs with --device cpu" in result.stdout + result.stderr
    assert "the router of the engines runs with" in result.stdout + result.stderr
    rows = [row for row in metrics_of(tmp_path) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["rollout/weight_version"] for row in rows] == [2, 3, 4]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_engines_that_fail_while_they_generate_cost_no_sample(
    run_train: Runner, base_flags: dict[str, Any], own_model: Path, tmp_path: Path
) -> None:
    """In the second rollout one of two is killed, in the third one hangs, in the fourth both end
    (``engine_faults``)."""
    num_rollout, num_tokens = 5, 400
    record = str(tmp_path / "rollout_{rollout_id}")
    flags = {k: v for k, v in base_flags.items() if k != "deterministic-rollout"}
    result = run_train(
        {
            **flags,
            "rollout-engine": "sglang",
            "rollout-num-gpus": 2,
            "router-policy": "round_robin",
            "rollout-health-check-interval": 2,
            "rollout-health-check-timeout": 10,
            "hf-checkpoint": own_model,
            "custom-generate-function-path": "tests.e2e.engine_faults.generate_under_faults",
            "rollout-max-response-len": num_tokens,
            "num-rollout": num_rollout,
            "save-debug-rollout-data": record,
            "run-dir": tmp_path,
        },
        timeout=560,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("restarting it") == 4, output
    samples = [s for i in range(num_rollout) for g in load_groups(record, i) for s in g]
    assert sorted(s.index for s in samples) == list(range(16 * num_rollout))
    assert {len(s.rollout_log_probs) for s in samples} == {num_tokens}
    rows = [row for row in metrics_of(tmp_path) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # Whoever was restarted has the trained weights: every push was compared besides.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert [row["rollout/replaced_engines"] for row in rows] == [0, 1, 1, 2, 0]
    # Where another engine is left, the router itself asks that one.
    assert rows[3]["rollout/retried_requests"] > 0
    # One update at the start and after each rollout; an engine that was restarted got the last.
    assert rows[-1]["rollout/weight_version"] == 1 + num_rollout
    assert servers_of(str(own_model)) == []
