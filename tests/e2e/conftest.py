"""Runs of ``train.py`` as a user starts them, on one Ray cluster for the whole session."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from miles.core.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]

Runner = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A local cluster that runs connect to: starting one for each would take most of the time."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context: Any = ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def environment(ray_address: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "RAY_ADDRESS": ray_address, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def reverse_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scripts import reverse_digits

    folder = tmp_path_factory.mktemp("data")
    reverse_digits.write_data(folder, 0, num_supervised=64, num_train=64, num_eval=8)
    return folder


@pytest.fixture(scope="session")
def base_flags(tiny_qwen3: Path, reverse_data: Path) -> dict[str, Any]:
    """Flags of a small deterministic run."""
    return {
        "train-backend": "fsdp",
        "actor-num-gpus-per-node": 2,
        "rollout-num-gpus": 1,
        "rollout-engine": "embedded",
        "deterministic-rollout": True,
        "fp32": True,
        "hf-checkpoint": tiny_qwen3,
        "prompt-data": reverse_data / "train.jsonl",
        "label-key": "label",
        "rollout-shuffle": True,
        "rm-type": "deterministic_random",
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "num-steps-per-rollout": 2,
        "micro-batch-size": 4,
        "num-rollout": 3,
        "rollout-max-response-len": 6,
        "lr": 1e-3,
        "check-weight-update-equal": True,
    }


@pytest.fixture(scope="session")
def run_train(environment: dict[str, str]) -> Runner:
    """Run ``train.py`` with flags; the result has its exit code and what it printed."""
    from miles.utils.external_utils.command_utils import to_argv

    def run(
        flags: dict[str, Any], *, timeout: float = 280, cwd: Path = ROOT
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *to_argv(flags)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def own_model(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """A copy whose path marks the processes of this test."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "marked-model"))


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start ``train.py`` and leave it running, like a shell in a process group of its own; it is
    ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(
        flags: dict[str, Any], *, cwd: Path = ROOT, env: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        from miles.utils.external_utils.command_utils import to_argv

        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *to_argv(flags)],
            cwd=cwd,
            env=environment if env is None else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[str]", every_s: float = 0.1
) -> None:
    deadline = time.monotonic() + 280
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get that far"
        time.sleep(every_s)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "megatron": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
}
"""How each backend lays the model over the two trainer ranks of a run."""

BACKENDS = ["fsdp", pytest.param("megatron", marks=(pytest.mark.megatron, pytest.mark.full))]


def with_backend(flags: dict[str, Any], backend: str) -> dict[str, Any]:
    return {**flags, "train-backend": backend, **LAYOUTS[backend]}


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """One row for each step."""
    return read_metrics(run_dir)


def completed(run_dir: Path) -> int:
    """How many steps have metrics."""
    path = run_dir / "metrics.jsonl"
    return len(metrics_of(run_dir)) if path.exists() else 0
