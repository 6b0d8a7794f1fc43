"""The flags are a promise: adding, renaming or changing one is a decision that a review sees."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.command_line import make_parser
from miles.config.flags import FlagSpec, flag_specs
from miles.config.reference import configuration_page
from miles.config.root import MilesConfig

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("flags.txt")


def describe(spec: FlagSpec) -> str:
    kind = spec.metavar or "switch"
    shared = " shared" if spec.shared else ""
    return f"{' '.join(spec.options)} {kind} [{spec.default_text}]{shared}"


def test_the_set_of_flags_is_frozen() -> None:
    """After a deliberate change: ``python -m tests.repo.test_frozen_flags`` prints the new file."""
    flags = [describe(spec) for spec in flag_specs(MilesConfig)]
    assert flags == SNAPSHOT.read_text().splitlines()


def test_the_configuration_page_is_generated() -> None:
    """After a change: ``make docs``."""
    assert (ROOT / "docs/configuration.md").read_text() == configuration_page(MilesConfig)


def test_every_flag_says_what_it_does() -> None:
    for spec in flag_specs(MilesConfig):
        assert len(spec.doc) > 5, spec.dest
        assert spec.doc.endswith("."), spec.dest
        assert spec.doc[0].isupper(), spec.dest


def test_no_prefix_abbreviation() -> None:
    assert make_parser().allow_abbrev is False


@pytest.mark.parametrize("word", ["getattr(config", "getattr(cfg"])
def test_config_is_never_read_by_string(word: str) -> None:
    sources = [*(ROOT / "miles").rglob("*.py"), ROOT / "train.py"]
    assert [path for path in sources if word in path.read_text()] == []


def test_help_answers_in_a_second_without_torch() -> None:
    code = (
        "import sys\n"
        "from miles.utils.arguments import parse_args\n"
        "try:\n    parse_args(['--help'])\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules)\n"
        "    sys.exit(str(heavy) if heavy else stop.code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = _children_cpu_s()
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--hf-checkpoint" in result.stdout
    # Processor time: a busy machine makes the answer no slower by this measure.
    assert _children_cpu_s() - before < 1.0


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    print("\n".join(describe(spec) for spec in flag_specs(MilesConfig)))
