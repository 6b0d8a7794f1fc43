"""A command that a recipe runs ends with the recipe."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from miles.utils.external_utils.command_utils import with_values_joined, words_of

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_S = 30.0

OWNER = """
import sys
from miles.utils.external_utils.command_utils import run_owned
sys.exit(run_owned([sys.executable, *sys.argv[1:]], {"MARK": "1"}, stop_timeout_s=1.0))
"""

CHILD = """
import os, signal, sys, time
from pathlib import Path
from miles.core import owned

folder = Path(sys.argv[1])
def note(number, frame):
    with (folder / "signals").open("a") as file:
        file.write(f"{number}\\n")
    if sys.argv[2] == "ends":
        raise SystemExit(7)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
owned.end_with_owner()
assert owned.OWNER not in os.environ
(folder / "pid.part").write_text(f"{os.getpid()} {os.environ['MARK']}")
(folder / "pid.part").rename(folder / "pid")
while True:
    time.sleep(0.1)
"""

Start = Callable[[str], tuple["subprocess.Popen[bytes]", psutil.Process]]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """An owner in a process group of its own, and its child, which notes signals and ``"ends"``
    or ``"stays"``."""
    started: list[subprocess.Popen[bytes]] = []
    children: list[psutil.Process] = []
    (tmp_path / "owner.py").write_text(OWNER)
    (tmp_path / "child.py").write_text(CHILD)

    def run(behaviour: str) -> tuple["subprocess.Popen[bytes]", psutil.Process]:
        files = [str(tmp_path / name) for name in ("owner.py", "child.py")]
        owner = subprocess.Popen(
            [sys.executable, *files, str(tmp_path), behaviour],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )
        started.append(owner)
        wait_for((tmp_path / "pid").exists)
        pid, mark = (tmp_path / "pid").read_text().split()
        assert mark == "1"
        children.append(psutil.Process(int(pid)))
        return owner, children[-1]

    yield run
    for owner in started:
        owner.kill()
        owner.wait(TIMEOUT_S)
    for child in children:
        if child.is_running():
            child.kill()


def signals(folder: Path) -> list[str]:
    return (folder / "signals").read_text().split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_the_group", [False, True])
def test_a_signal_reaches_the_child_once_and_is_the_exit_code(
    start: Start, tmp_path: Path, number: signal.Signals, to_the_group: bool
) -> None:
    """A terminal sends it to the whole group."""
    owner, child = start("ends")
    (os.killpg if to_the_group else os.kill)(owner.pid, number)
    assert owner.wait(TIMEOUT_S) == 128 + number
    assert not child.is_running()
    assert signals(tmp_path) == [str(int(number))]


def test_a_child_that_does_not_end_is_killed_and_repeated_signals_are_one(
    start: Start, tmp_path: Path
) -> None:
    owner, child = start("stays")
    for _ in range(3):
        owner.send_signal(signal.SIGTERM)
        wait_for((tmp_path / "signals").exists)
    assert owner.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not child.is_running()
    assert signals(tmp_path) == ["15"]


def test_a_child_whose_owner_was_killed_gets_the_signal_that_ends_it(
    start: Start, tmp_path: Path
) -> None:
    owner, child = start("ends")
    owner.kill()
    owner.wait(TIMEOUT_S)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert signals(tmp_path) == ["15"]


@pytest.mark.parametrize(("code", "wanted"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_childs(tmp_path: Path, code: str, wanted: int) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "owner.py"), "-c", f"import os, sys; {code}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == wanted


def test_more_flags_are_joined_to_the_option_that_takes_them() -> None:
    for given in (["--flags", "--lr 1"], ["--flags=--lr 1"]):
        argv = with_values_joined(["--seed", "2", *given, "--seed", "3"], "--flags")
        assert argv == ["--seed", "2", "--flags=--lr 1", "--seed", "3"]
    assert with_values_joined(["--more_flags", "--lr"], "--more-flags") == ["--more_flags=--lr"]
    assert with_values_joined(["--flags"], "--flags") == ["--flags"]


def test_more_flags_are_parted_as_a_shell_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert words_of("--flags", "") == []
    assert words_of("--flags", "--tool 'two words' --on") == ["--tool", "two words", "--on"]
    with pytest.raises(SystemExit, match="2"):
        words_of("--flags", "--tool 'two")
    assert """--flags = "--tool 'two": cannot be parted: No closing""" in capsys.readouterr().err
