"""Ctrl-C at any moment ends every process, frees every port, and leaves a valid checkpoint."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles.backends.training_utils.checkpoints import check_load, read_tracker
from miles.ray.cluster import WORKING_DIR
from tests.e2e.conftest import Runner, Start, completed, wait_until

GONE_TIMEOUT_S = 60.0
"""How long after the driver Ray's workers may be seen."""


def processes_in(folder: Path) -> list[psutil.Process]:
    """All processes of the run that was started in ``folder``."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(WORKING_DIR) == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def ports_of(processes: list[psutil.Process]) -> set[int]:
    """Where they listen."""
    ports: set[int] = set()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


def is_running(folder: Path, program: str) -> bool:
    """Whether a process of the run has this in its command line."""
    for process in processes_in(folder):
        try:
            if any(program in word for word in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def interrupt(process: "subprocess.Popen[str]", folder: Path, sign: signal.Signals) -> str:
    """What was printed, after checks that nothing of the run is left."""
    running = processes_in(folder)
    ports = ports_of(running)
    assert len(running) > 1, "the driver alone"
    # As a terminal does it: to the driver and what it has started itself.
    os.killpg(process.pid, sign)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := processes_in(folder):
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.2)
    # A connection of another process may have one of them for a moment.
    while taken := [port for port in ports if not can_listen(port)]:
        assert time.monotonic() < deadline, taken
        time.sleep(0.2)
    return output


def can_listen(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Generator[None]:
    """A shell has what it starts in the background ignore them, and so would the runs here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def flags(base_flags: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A long run that saves after every rollout."""
    return {
        **base_flags,
        "num-rollout": 500,
        "save": tmp_path / "ckpt",
        "load": tmp_path / "ckpt",
        "save-interval": 1,
        "save-keep": 2,
        "run-dir": tmp_path / "run",
    }


@pytest.fixture
def run_in(start: Start, environment: dict[str, str]) -> Callable[..., "subprocess.Popen[str]"]:
    """Start a run in a folder, which marks its processes."""

    def run(
        flags: dict[str, Any], folder: Path, *, without: tuple[str, ...] = ()
    ) -> "subprocess.Popen[str]":
        env = {k: v for k, v in environment.items() if k not in without}
        return start(flags, cwd=folder, env={**env, WORKING_DIR: str(folder)})

    return run


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupt_ends_every_process_and_leaves_the_last_checkpoint_valid(
    run_in: Start, flags: dict[str, Any], tmp_path: Path, sign: signal.Signals
) -> None:
    process = run_in(flags, tmp_path)
    wait_until(lambda: completed(tmp_path / "run") >= 3, process)
    interrupt(process, tmp_path, sign)
    assert check_load(str(tmp_path / "ckpt"), "fsdp") == []
    assert (read_tracker(tmp_path / "ckpt") or 0) >= 2


def test_an_interrupt_while_engine_and_trainer_load_ends_every_process(
    run_in: Start, flags: dict[str, Any], tmp_path: Path
) -> None:
    process = run_in(flags, tmp_path)
    wait_until(lambda: is_running(tmp_path, "miles.backends.embedded.server"), process)
    output = interrupt(process, tmp_path, signal.SIGINT)
    assert "interrupted" in output
    assert "Traceback" not in output
    assert completed(tmp_path / "run") == 0


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_ray_starts_for_this_run_alone_ends_it_too(
    run_in: Start, flags: dict[str, Any], tmp_path: Path, sign: int
) -> None:
    process = run_in(flags, tmp_path, without=("RAY_ADDRESS",))
    wait_until(lambda: is_running(tmp_path, "gcs_server"), process)
    output = interrupt(process, tmp_path, sign)
    assert "interrupted" in output
    assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.parametrize("moment", ["slots are found", "rollouts run"])
def test_a_signal_that_reaches_rays_own_processes_too_ends_the_run_at_once(
    run_in: Start, flags: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    """As ``timeout`` sends it, or the end of a batch job: Ray's head does not outlive it."""
    process = run_in(flags, tmp_path, without=("RAY_ADDRESS",))
    reached = {
        "slots are found": lambda: is_running(tmp_path, "default_worker.py"),
        "rollouts run": lambda: completed(tmp_path / "run") >= 2,
    }
    wait_until(reached[moment], process)
    begin = time.monotonic()
    output = interrupt(process, tmp_path, signal.SIGTERM)
    assert time.monotonic() - begin < 40
    assert "interrupted" in output
    assert "Failed to connect to GCS" not in output
    assert check_load(str(tmp_path / "ckpt"), "fsdp") == []


@pytest.mark.full
def test_an_interrupt_during_a_save_leaves_the_older_checkpoint_from_which_a_run_goes_on(
    run_in: Start, run_train: Runner, flags: dict[str, Any], tmp_path: Path
) -> None:
    ckpt = tmp_path / "ckpt"

    def saves_again() -> bool:
        return any(ckpt.glob("iter_*.tmp")) and read_tracker(ckpt) is not None

    process = run_in(flags, tmp_path)
    wait_until(saves_again, process, every_s=0.001)
    interrupt(process, tmp_path, signal.SIGINT)
    assert check_load(str(ckpt), "fsdp") == []
    saved = read_tracker(ckpt)
    assert saved is not None
    resumed = run_train({**flags, "debug-exit-after-rollout": 1})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert read_tracker(ckpt) == saved + 1
    assert not any(ckpt.glob("*.tmp"))
