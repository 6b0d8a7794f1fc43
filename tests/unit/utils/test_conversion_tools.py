"""How a conversion tool ends: its exit code and what it says."""

import pytest

from miles.config.errors import ConfigError, Problem
from miles.core.distributed import FailedElsewhereError
from miles.core.hf import CheckpointDirError
from miles.utils.conversion_tools import told


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ConfigError([Problem("--load", "x", "no"), Problem("--save", "", "is required")]),
            2,
            "tool: 2 problems:\n  --load = 'x': no\n  --save: is required\n",
        ),
        (
            CheckpointDirError("'/m' has no weights"),
            2,
            "tool: 1 problem:\n  --hf-checkpoint: '/m' has no weights\n",
        ),
        (OSError(28, "No space left"), 1, "tool: error: [Errno 28] No space left\n"),
        (FailedElsewhereError("rank 1"), 1, "tool: error: rank 1\n"),
        (KeyboardInterrupt(), 130, "tool: interrupted; run it again for the whole\n"),
    ],
    ids=["problems", "model", "disk", "other rank", "interrupt"],
)
def test_an_error_is_told_without_a_traceback(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, told("tool"):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == says


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError, match="never written"), told("tool"):
        raise AssertionError("never written")


def test_torchruns_processes_on_a_machine_tell_the_problems_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, told_by in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended, told("tool"):
            raise ConfigError([Problem("--save", "", "is required")])
        assert ended.value.code == 2
        assert bool(capsys.readouterr().err) == told_by
