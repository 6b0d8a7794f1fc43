"""How a problem is told."""

import pytest

from miles.config.command_line import read_command_line
from miles.config.errors import Problem
from miles.config.rules.problems import problem
from miles.config.rules.ranges import numbers_are_in_range


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "--flag = 4: no"),
        ("x", "--flag = 'x': no"),
        (None, "--flag = None: no"),
        ("", "--flag: no"),
        (True, "--flag = on: no"),
        (False, "--flag = off: no"),
        ((True, False), "--flag = (on, off): no"),
        (("x", 2, False), "--flag = ('x', 2, off): no"),
        ((1, 2), "--flag = (1, 2): no"),
        ("x" * 398, f"--flag = '{'x' * 398}': no"),
        ("x" * 5000, f"--flag = '{'x' * 399}... (5002 characters): no"),
    ],
)
def test_values_are_shown_as_a_user_gives_them(value: object, text: str) -> None:
    assert str(Problem("--flag", value, "no")) == text


def test_a_flag_that_switches_off_is_on_when_it_is_given() -> None:
    config = read_command_line(["--no-keep-fp32-master"]).config
    assert str(problem(config, "keep_fp32_master", remedy="no")) == "--no-keep-fp32-master = on: no"


def test_bounds_are_told_in_full() -> None:
    line = read_command_line(["--seed", "-1"])
    (found,) = numbers_are_in_range(line.config, line.given)
    assert found.remedy == "must be >= 0 and <= 4294967295"
