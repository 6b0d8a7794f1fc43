"""What breaks in the middle of a run, and what the user sees then."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles.backends.training_utils.checkpoints import REQUESTED, check_load, read_tracker
from miles.utils.external_utils.command_utils import to_argv
from tests.e2e.conftest import ROOT, Start, completed, metrics_of, wait_until, with_backend

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def engines_of(model: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(model) in command and "miles.backends.embedded.server" in command:
            found.append(process)
    return found


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
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    # One at the start and one after each rollout: a replacement is no update.
    assert rows[-1]["rollout/weight_version"] == 9
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
        timeout=280,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "trying once more" in result.stderr
    assert "error: Ray did not start on this machine, twice" in result.stderr
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
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["rollout/replaced_engines"] for row in rows) == 1
    assert not engines_of(own_model)


@pytest.mark.full
@pytest.mark.megatron
@pytest.mark.parametrize(
    "memory",
    [
        {
            "rematerialize-param-from-master-weight": True,
            "check-rematerialize-param-from-master-weight": True,
        },
        {"offload-train-target": "disk", "stream-optimizer-state-to-disk": True},
    ],
    ids=["rematerialized", "streamed"],
)
def test_engines_that_die_colocated_get_weights_that_the_trainer_does_not_hold(
    run_train: Runner,
    base_flags: dict[str, Any],
    own_model: Path,
    tmp_path: Path,
    memory: dict[str, Any],
) -> None:
    """While it sleeps it has neither them nor a copy; here they are asked for once more."""
    if "offload-train-target" in memory:
        memory = {**memory, "offload-train-disk-dir": tmp_path / "scratch"}
    hook = "tests.e2e.broken_hooks.kill_the_engines_after_the_second_rollout"
    omitted = ("rollout-num-gpus", "fp32")
    result = run_train(
        {
            **with_backend({k: v for k, v in base_flags.items() if k not in omitted}, "megatron"),
            "hf-checkpoint": own_model,
            "colocate": True,
            "rollout-num-gpus-per-engine": 2,
            **memory,
            "custom-reward-post-process-path": hook,
            "run-dir": tmp_path / "run",
        }
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "restarting it" in result.stdout + result.stderr
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]


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
def test_a_reward_that_ends_the_process_is_named_as_the_likely_cause(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    reward = "tests.e2e.broken_hooks.end_the_process"
    result = run_train(
        {**base_flags, "rm-type": None, "custom-rm-path": reward, "run-dir": tmp_path}
    )
    assert result.returncode == 1
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("error:")]
    assert "rollout manager failed during rollout 0: the process died" in line
    assert f"Its process runs your --custom-rm-path {reward}" in line
    assert "os._exit" in line


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


@pytest.mark.full
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


@pytest.mark.full
def test_a_save_that_was_asked_for_and_failed_is_made_by_the_run_that_resumes(
    run_train: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    """Asked for, a save is complete before the run goes on and before the file is removed: one in
    the background would fail later, without it."""
    sentinel, ckpt = tmp_path / "save-now", tmp_path / "ckpt"
    flags = {
        **base_flags,
        "save": ckpt,
        "load": ckpt,
        "async-save": True,
        "save-trigger-sentinel": sentinel,
    }
    hooks = "tests.e2e.broken_hooks"
    harm = {
        "custom-reward-post-process-path": f"{hooks}.ask_for_a_save_in_every_rollout",
        "loss-type": "custom_loss",
        "custom-loss-function-path": f"{hooks}.no_file_grows_after_the_first_checkpoint",
    }
    failed = run_train({**flags, **harm, "run-dir": tmp_path / "a"})
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "saving after rollout 1" in failed.stderr
    assert "File too large" in failed.stderr
    assert sentinel.exists()
    assert steps_in(ckpt) == {"iter_0000001": True}
    assert check_load(str(ckpt), "fsdp") == []

    resumed = run_train({**flags, "run-dir": tmp_path / "b"})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [row["step"] for row in metrics_of(tmp_path / "b")] == [2, 3]
    assert not sentinel.exists()
    # The last one is saved in any case.
    assert steps_in(ckpt) == {"iter_0000001": True, "iter_0000002": True, "iter_0000003": False}
    assert read_tracker(ckpt) == 3


def steps_in(save: Path) -> dict[str, bool]:
    """Directories of checkpoints, half-written ones too, and whether each was asked for."""
    return {step.name: (step / REQUESTED).exists() for step in sorted(save.glob("iter_*"))}


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
