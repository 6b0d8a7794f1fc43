"""Which Megatron a process would import, with interpreters that see another one or none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.backends.megatron_utils import package

ROOT = Path(__file__).parents[4]
PROBLEM = (
    "from miles.backends.megatron_utils import package\n"
    "import sys\n"
    "print(package.problem())\n"
    "assert not {'torch', 'megatron.core'} & set(sys.modules)\n"
)


def checkout(folder: Path, version: str, *, training: bool = True) -> Path:
    """A folder that looks like a checkout of Megatron-LM."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, patch = version.split(".")
    (core / "package_info.py").write_text(
        f'# A comment\nMAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = "rc0"\n'
        "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n__version__ = '.'.join(map(str, VERSION))\n"
    )
    if training:
        (folder / "megatron" / "training").mkdir()
        (folder / "megatron" / "training" / "arguments.py").write_text("")
    return folder


def problem_with(*options: str, path: str) -> str:
    return subprocess.run(
        [sys.executable, *options, "-c", PROBLEM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout


@pytest.mark.megatron
def test_the_installed_version_is_the_one_that_is_tested() -> None:
    from importlib.metadata import version

    assert version("megatron-core") == package.TESTED_VERSION
    assert package.problem() is None
    pins = (ROOT / "pyproject.toml").read_text()
    assert f'"megatron-core=={package.TESTED_VERSION}"' in pins


def test_without_megatron_the_extra_and_the_version_are_named() -> None:
    text = problem_with("-S", path=str(ROOT))
    assert "[megatron]" in text
    assert package.TESTED_VERSION in text
    assert "--train-backend fsdp" in text


def test_a_checkout_on_pythonpath_goes_before_the_installed_wheel(tmp_path: Path) -> None:
    text = problem_with(path=f"{checkout(tmp_path, '0.18.3')}:{ROOT}")
    assert "found megatron-core 0.18.3rc0" in text
    assert str(tmp_path) in text
    assert package.TESTED_VERSION in text


def test_a_package_without_the_training_half_is_refused(tmp_path: Path) -> None:
    assert "no megatron.training" in problem_with(
        "-S", path=f"{checkout(tmp_path, '0.19.2', training=False)}:{ROOT}"
    )


def test_a_version_is_read_without_importing_it(tmp_path: Path) -> None:
    assert package.version_in(checkout(tmp_path, "0.20.1") / "megatron") == "0.20.1rc0"
    assert package.version_in(tmp_path / "nowhere") is None
    (tmp_path / "megatron/core/package_info.py").write_text("VERSION = (0, 1)\n")
    assert package.version_in(tmp_path / "megatron") is None
