"""The actor around a server process, without Ray."""

from pathlib import Path

import pytest

from miles.ray.rollout.engine_holder import EngineHolder, EngineLaunch


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL.*memory.*\\(empty\\)"),
        ("import sys; print('no such model'); sys.exit(3)", "exit status 3.*no such model"),
    ],
)
def test_a_server_that_ends_at_start_is_told_of_with_its_end_and_its_log(
    code: str, told: str, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "engine.log"
    launch = EngineLaunch(
        arguments=("-c", code), environment={}, log_file=str(log), start_timeout_s=60
    )
    with pytest.raises(RuntimeError, match=f"(?s)the server ended at start, .*{told}") as caught:
        EngineHolder("the server").start(launch)
    assert str(log) in str(caught.value)
