"""Runs with the switches that real jobs use together."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.core.hf import tensor_names
from miles.rollout.debug_data import load_groups
from miles.utils.external_utils.command_utils import to_argv
from scripts.made_models import make_qwen3_moe
from tests.e2e.conftest import BACKENDS, ROOT, metrics_of, with_backend
from tests.metrics_page import unlisted

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def training(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k.startswith("train/")}


@pytest.fixture(scope="module")
def recorded(
    run_train: Runner, base_flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two engines race: over-sampling, partial rollouts, packed bf16, async save, TensorBoard."""
    folder = tmp_path_factory.mktemp("recorded")
    flags = {k: v for k, v in base_flags.items() if k not in ("deterministic-rollout", "fp32")}
    del flags["micro-batch-size"]
    result = run_train(
        {
            **flags,
            "rollout-num-gpus": 2,
            "over-sampling-batch-size": 7,
            "partial-rollout": True,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 64,
            "rollout-max-context-len": 40,
            "rollout-max-response-len": 24,
            "gradient-checkpointing": True,
            "use-kl-loss": True,
            "kl-loss-coef": 0.1,
            "kl-loss-type": "low_var_kl",
            "async-save": True,
            "save": folder / "ckpt",
            "save-interval": 1,
            "eval-interval": 2,
            "eval-prompt-data": ["digits", base_flags["prompt-data"].parent / "eval.jsonl@[:4]"],
            "n-samples-per-eval-prompt": 2,
            "log-passrate": True,
            "save-debug-rollout-data": folder / "rollout-{rollout_id}.msgpack",
            "tensorboard-dir": folder / "tensorboard",
            "run-dir": folder / "run",
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.full
def test_no_prompt_is_trained_twice_or_left_out(recorded: Path) -> None:
    ids = [
        group[0].group_id
        for rollout_id in range(3)
        for group in load_groups(str(recorded / "rollout-{rollout_id}.msgpack"), rollout_id)
    ]
    assert len(ids) == 12
    assert len(set(ids)) == 12
    assert max(ids) < 3 * 7 + 12


@pytest.mark.full
def test_evaluation_reports_pass_at_k_and_events_reach_tensorboard(recorded: Path) -> None:
    rows = [row for row in metrics_of(recorded / "run") if "eval/digits" in row]
    assert [row["step"] for row in rows] == [0, 2]
    assert any("pass" in name for name in rows[0])
    assert list((recorded / "tensorboard").glob("events.*"))


@pytest.mark.full
def test_every_metric_is_on_the_page(recorded: Path) -> None:
    assert unlisted(metrics_of(recorded / "run")) == set()


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_from_recorded_rollouts_equals_training_from_live_ones(
    backend: str, run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    base_flags = with_backend(base_flags, backend)
    record = tmp_path / "rollout-{rollout_id}.msgpack"
    live = run_train({**base_flags, "save-debug-rollout-data": record, "run-dir": tmp_path / "a"})
    assert live.returncode == 0, live.stdout + live.stderr
    base_flags |= {"colocate": True, "rollout-num-gpus": None}
    replay = run_train({**base_flags, "load-debug-rollout-data": record, "run-dir": tmp_path / "b"})
    assert replay.returncode == 0, replay.stdout + replay.stderr
    expected = [training(row) for row in metrics_of(tmp_path / "a")]
    rows = metrics_of(tmp_path / "b")
    assert [training(row) for row in rows] == expected
    moves = {name for row in rows for name in row if name.startswith("perf/offload/")}
    assert not moves, "there are no engines to make room for"


@pytest.mark.full
def test_a_run_without_trainer_starts_at_the_rollout_it_is_told_to(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    result = run_train(
        {**base_flags, "debug-rollout-only": True, "start-rollout-id": 2, "run-dir": tmp_path}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [row["step"] for row in metrics_of(tmp_path)] == [3]


@pytest.mark.full
@pytest.mark.parametrize("state", ["resident", "streamed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(
    backend: str,
    state: str,
    run_train: Runner,
    environment: dict[str, str],
    base_flags: dict[str, Any],
    tmp_path: Path,
) -> None:
    flags = {
        **with_backend(base_flags, backend),
        "num-rollout": 6,
        "save": tmp_path / "ckpt",
        "load": tmp_path / "ckpt",
        "save-interval": 1,
    }
    without_saving = {k: v for k, v in flags.items() if k not in ("save", "load", "save-interval")}
    if state == "streamed":
        # The run that is not killed keeps its state on the device.
        turns = {"colocate": True, "rollout-num-gpus": None}
        without_saving |= turns
        flags |= turns | {
            "offload-train-target": "disk",
            "offload-train-disk-dir": tmp_path / "scratch",
            "stream-optimizer-state-to-disk": True,
        }
    whole = run_train({**without_saving, "run-dir": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stdout + whole.stderr
    command = [sys.executable, str(ROOT / "train.py")]
    run_dir = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, *to_argv({**flags, "run-dir": run_dir})], cwd=ROOT, env=environment
    )
    deadline = time.monotonic() + 150
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_of(run_dir)) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    resumed = run_train({**flags, "run-dir": run_dir})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = {row["step"]: training(row) for row in metrics_of(run_dir)}
    expected = {row["step"]: training(row) for row in metrics_of(tmp_path / "whole")}
    assert json.dumps(rows, sort_keys=True) == json.dumps(expected, sort_keys=True)


@pytest.mark.full
def test_a_mixture_of_experts_trains_and_its_experts_reach_the_engines(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    """The engines' weights are compared after every sync, one digest for each expert's matrix."""
    model = make_qwen3_moe(tmp_path / "moe")
    flags = {**base_flags, "hf-checkpoint": model, "save": tmp_path / "ckpt", "save-interval": 3}
    exports = {"save-hf": tmp_path / "hf-{rollout_id}"}
    result = run_train({**flags, **exports, "run-dir": tmp_path / "run"}, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [row["step"] for row in metrics_of(tmp_path / "run")][-1] == 3
    assert tensor_names(str(tmp_path / "hf-2")) == tensor_names(str(model))
