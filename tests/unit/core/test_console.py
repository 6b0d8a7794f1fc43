"""What a run prints for each rollout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.core.console import RunConsole

METRICS = {
    "rollout/raw_reward": 0.6254,
    "rollout/response_len/mean": 211.26,
    "train/loss": -0.01237,
    "train/ppo_kl": 0.000314,
    "train/grad_norm": 1.2345,
    "train/lr": 1e-6,
    "perf/rollout_time": 12.346,
    "perf/train_time": 6.789,
    "perf/update_weights_time": 0.1264,
    "perf/tokens_per_s": 45678.9,
    "perf/step_time": 20.0,
    "train/entropy": 0.5,
}


def printed(capsys: pytest.CaptureFixture[str], rollout_id: int, metrics: dict[str, float]) -> str:
    RunConsole(120).rollout(rollout_id, metrics)
    return capsys.readouterr().out


def test_a_rollout_is_one_line_of_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than 80 columns, and not wrapped: a log file is searched line by line."""
    assert printed(capsys, 8, METRICS) == (
        "rollout   9/120  reward 0.625  len 211.3  loss -0.0124  kl 3.1e-04  grad 1.23  lr 1.0e-06"
        "  gen s 12.35  train s 6.79  sync s 0.13  tok/s 45,679\n"
    )


def test_what_a_run_does_not_measure_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """As with --debug-rollout-only, where nothing is trained."""
    generated = {k: v for k, v in METRICS.items() if k.startswith("rollout/")}
    assert printed(capsys, 119, generated) == "rollout 120/120  reward 0.625  len 211.3\n"


def test_a_number_that_is_not_finite_is_printed_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"train/loss": float("nan"), "train/grad_norm": float("inf")}
    assert printed(capsys, 0, metrics) == "rollout   1/120  loss +nan  grad inf\n"


def test_an_evaluation_is_one_line_of_its_scores_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RunConsole(3).evaluation(2, {"eval/math": 0.25, "eval/digits": 0.5})
    assert (
        capsys.readouterr().out
        == "evaluation after 2 rollouts  eval/digits 0.500  eval/math 0.250\n"
    )


SAYS_MUCH = """
import sys
from miles.core.console import RunConsole, until_output_closes

def program():
    try:
        for number in range(100_000):
            say(str(number))
    finally:
        print("taken down", file=sys.stderr)
    return 0

say = {"rich": RunConsole(0).say, "print": print}[sys.argv[1]]
sys.exit(until_output_closes(program))
"""

CONNECTION_LOST = """
import sys
from miles.core.console import until_output_closes

def program():
    raise BrokenPipeError("of an engine")

sys.exit(until_output_closes(program))
"""


def first_line_read(script: str, *arguments: str) -> tuple[str, int, str]:
    """The first line of a program whose output is read no further, its exit code and errors."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        return line, process.wait(30), errors


@pytest.mark.parametrize("way", ["rich", "print"])
def test_a_program_whose_output_is_cut_off_ends_as_a_shell_says_of_that_signal(way: str) -> None:
    assert first_line_read(SAYS_MUCH, way) == ("0\n", 128 + 13, "taken down\n")


def test_a_connection_that_breaks_is_not_taken_for_the_output() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CONNECTION_LOST],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert result.returncode == 1
    assert "BrokenPipeError: of an engine" in result.stderr
