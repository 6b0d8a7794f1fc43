"""``scripts/bootstrap.sh`` on machines that lack one thing or another, simulated through PATH."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "chmod", "cp", "dirname", "env", "mkdir", "rm")

# Stands for the interpreter: its environments work, or break where ``kind`` says so.
PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "{log}"
case "$*" in
    "-c import pip") [ "{kind}" != "no pip" ] || [ -e "{log}.pip" ];;
    "-m venv "*)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        [ "{kind}" != "no ensurepip" ];;
    "-m ensurepip") exit 1;;
esac
"""

UV = """#!/usr/bin/env bash
echo "uv $*" >> "{log}"
case "$*" in
    "python find "*) [ -z "{python}" ] || echo "{python}";;
    "venv "*)
        target=${{@: -1}}
        [ -e "$target" ] && {{ echo "$target exists; use --clear" >&2; exit 2; }}
        mkdir -p "$target/bin"
        cp "{template}" "$target/bin/python";;
    "pip install "*) echo yes > "{log}.pip";;
esac
"""


class Machine:
    """A checkout, and a PATH with nothing on it but a few tools and what is put there."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin = folder / "checkout", folder / "bin"
        self.log = folder / "log"
        (self.checkout / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "bootstrap.sh", self.checkout / "scripts")
        self.bin.mkdir()
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.bin / tool).symlink_to(path)

    def python(self, path: Path, kind: str = "good") -> Path:
        return self._write(path, PYTHON.format(log=self.log, kind=kind))

    def uv(self, python: Path | str = "") -> None:
        template = self.python(self.bin.parent / "template")
        text = UV.format(log=self.log, python=python, template=template)
        self._write(self.bin / "uv", text)

    def bootstrap(self) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.bin / "bash", self.checkout / "scripts" / "bootstrap.sh", ".venv"],
            env={"PATH": str(self.bin), "HOME": str(self.bin.parent)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def _write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_new_python_it_says_what_to_install(machine: Machine) -> None:
    result = machine.bootstrap()
    assert result.returncode == 1
    assert "Python 3.12" in result.stderr
    assert "uv python install" in result.stderr
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize("place", ["path", "pyenv", "uv"])
def test_a_new_python_is_found_wherever_it_is(machine: Machine, tmp_path: Path, place: str) -> None:
    if place == "path":
        machine.python(machine.bin / "python3.12")
    elif place == "pyenv":
        machine.python(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python")
    else:
        machine.uv(machine.python(tmp_path / "uv" / "cpython-3.12" / "bin" / "python3"))
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    assert any("--editable .[dev]" in call for call in machine.calls())


def test_a_python_that_cannot_install_pip_leaves_the_environment_to_uv(machine: Machine) -> None:
    machine.python(machine.bin / "python3", kind="no ensurepip")
    machine.uv()
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    assert any(call.startswith("uv venv --seed") for call in machine.calls())


def test_a_python_that_cannot_install_pip_is_named_where_there_is_no_uv(machine: Machine) -> None:
    machine.python(machine.bin / "python3", kind="no ensurepip")
    for _ in range(2):
        result = machine.bootstrap()
        assert result.returncode == 1
        assert "install python3-venv, or uv" in result.stderr


def test_an_environment_without_pip_gets_it_from_uv(machine: Machine) -> None:
    machine.python(machine.checkout / ".venv" / "bin" / "python", kind="no pip")
    machine.uv()
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    assert any(call.startswith("uv pip install") for call in machine.calls())
