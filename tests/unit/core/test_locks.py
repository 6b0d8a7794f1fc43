"""A directory is one process's own, for as long as that process lives."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.core import locks

HOLDER = """
import sys
from pathlib import Path
from miles.core import locks

with locks.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds ``tmp_path``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_directory_that_is_held_is_refused_with_the_process_that_holds_it(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    with pytest.raises(locks.HeldError, match=f"process {holder.pid} on "), locks.held(tmp_path):
        pass


def test_a_killed_process_holds_nothing(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    with locks.held(tmp_path):
        pass


def test_a_directory_is_free_again_after_its_run(tmp_path: Path) -> None:
    for _ in range(2):
        with locks.held(tmp_path):
            pass
