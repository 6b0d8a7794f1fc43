"""What breaks in the middle of a run, and what the user sees then."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles.backends.training_utils.checkpoints import check_load, read_tracker
from miles.utils.external_utils.command_utils import to_argv
from tests.e2e.conftest import ROOT, metrics_of

Start = Callable[..., "subprocess.Popen[str]"]
Runner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def own_model(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """A copy whose path marks the processes of this test."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "marked-model"))


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start ``train.py`` and leave it running; it is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(flags: dict[str, Any]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *to_argv(flags)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get that far"
        time.sleep(0.1)


def engines_of(model: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(model) in command and "miles.backends.embedded.server" in command:
            found.append(process)
    return found


def completed(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(metrics_of(run_dir)) if path.exists() else 0


def test_a_killed_engine_is_replaced_and_no_rollout_is_lost(
    start: Start, base_flags: dict[str, Any], own_model: Path, tmp_path: Path
) -> None:
    process = start(
        {
            **base_flags,
            "hf-checkpoint": own_model,
            "num-rollout": 8,
            "rollout-max-response-len": 64,
            "run-dir": tmp_path / "run",
        }
    )
    wait_until(lambda: completed(tmp_path / "run") >= 2, process)
    (engine,) = engines_of(own_model)
    engine.kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "restarting it" in output
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 9))
    assert not engines_of(own_model)


def test_ray_that_does_not_start_is_told_with_the_remedy(
    environment: dict[str, str], base_flags: dict[str, Any], tmp_path: Path
) -> None:
    """Its sockets lie in this folder, whose path is longer than that of a socket may be."""
    alone = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *to_argv({**base_flags, "run-dir": tmp_path})],
        cwd=ROOT,
        env={**alone, "RAY_TMPDIR": str(tmp_path / ("x" * 120))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: Ray did not start on this machine" in result.stderr
    assert "RAY_TMPDIR" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_an_engine_that_dies_while_the_trainer_works_is_replaced(
    run_train: Runner, base_flags: dict[str, Any], own_model: Path, tmp_path: Path
) -> None:
    hook = "tests.e2e.broken_hooks.kill_the_engines_after_the_second_rollout"
    result = run_train(
        {
            **base_flags,
            "hf-checkpoint": own_model,
            "custom-reward-post-process-path": hook,
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "restarting it" in result.stdout + result.stderr
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]
    assert not engines_of(own_model)


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupt_ends_every_process_and_leaves_the_last_checkpoint_valid(
    start: Start, base_flags: dict[str, Any], own_model: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    process = start(
        {
            **base_flags,
            "hf-checkpoint": own_model,
            "num-rollout": 500,
            "save": tmp_path / "ckpt",
            "save-interval": 1,
            "save-keep": 2,
            "run-dir": tmp_path / "run",
        }
    )
    wait_until(lambda: completed(tmp_path / "run") >= 3, process)
    process.send_signal(sign)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert not engines_of(own_model)
    assert check_load(str(tmp_path / "ckpt"), "fsdp") == []
    assert (read_tracker(tmp_path / "ckpt") or 0) >= 2


def test_a_failure_in_user_code_names_actor_rollout_and_cause(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    result = run_train(
        {
            **base_flags,
            "custom-generate-function-path": "tests.e2e.broken_hooks.fail_in_the_second_rollout",
            "rollout-shuffle": None,
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 1
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("error:")]
    assert "rollout manager" in line
    assert "rollout 1" in line
    assert "the tool server is gone" in line


@pytest.mark.full
def test_a_failure_in_evaluation_keeps_the_metrics_of_the_rollout_before_it(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    result = run_train(
        {
            **base_flags,
            "eval-function-path": "tests.e2e.broken_hooks.fail_to_evaluate",
            "eval-interval": 2,
            "skip-eval-before-train": True,
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 1
    assert "evaluation after 2 rollouts" in result.stderr
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert "train/grad_norm" in rows[1]


def test_a_disk_that_fills_during_a_save_leaves_the_older_checkpoint(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mount.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        result = run_train(
            {**base_flags, "save": disk / "ckpt", "save-interval": 1, "run-dir": tmp_path / "run"}
        )
        assert result.returncode == 1
        assert "saving after rollout 1" in result.stderr
        assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2], "it was trained"
        assert read_tracker(disk / "ckpt") == 1
        assert check_load(str(disk / "ckpt"), "fsdp") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_too_many_slots_are_refused_with_what_is_missing(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    slots = 10 * (os.cpu_count() or 1) + 10
    result = run_train(
        {
            **base_flags,
            "actor-num-gpus-per-node": slots,
            "rollout-batch-size": slots,
            "placement-timeout-s": 2,
            "run-dir": tmp_path,
        }
    )
    assert result.returncode == 1
    assert "CPU: needed" in result.stderr
    assert "--placement-timeout-s" in result.stderr
