"""Parsers of somebody else, asked as functions."""

import argparse
import sys
import warnings

import pytest

from miles.config.command_line import Foreign
from miles.config.foreign_parser import ArgumentError, HelpFormatter, Parser, asking, fault_of
from miles.config.foreign_parser import words_of as words


def odd(text: str) -> int:
    """A conversion that fails in its own way."""
    raise AttributeError(f"no attribute {text}")


@pytest.fixture
def parser() -> Parser:
    made = Parser(allow_abbrev=False, add_help=False)
    made.add_argument("--size", type=int, help="at most 100% of it")
    made.add_argument("--odd", type=odd)
    made.add_argument("--version", action="version", version="1.2")
    return made


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        (["--size", "3"], None),
        (["--size=-3"], None),
        (["--size", "x"], "invalid int value: 'x'"),
        (["--size"], "expected one argument"),
        (["--size", "3", "4"], "takes no further value: 4"),
        (["--odd", "x"], "no attribute x"),
        (["--version"], "1.2"),
    ],
)
def test_the_fault_of_one_option_is_said_without_its_name(
    parser: Parser, typed: list[str], fault: str | None
) -> None:
    assert fault_of(parser, typed) == fault


def test_a_value_that_looks_like_an_option_is_joined_to_its_flag() -> None:
    assert words(Foreign(name="--sglang-size", words=("-3",)), "--size") == ["--size=-3"]
    assert words(Foreign(name="--size", words=("3", "-4")), "--size") == ["--size", "3", "-4"]


def assert_loudly() -> None:
    print("a banner")
    warnings.warn("a kernel is missing", stacklevel=1)
    raise AssertionError("must be larger")


def end_the_process() -> None:
    print("prog: error: too small", file=sys.stderr)
    raise SystemExit(2)


def test_nothing_is_printed_while_others_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for refuse, says in ((assert_loudly, "must be larger"), (end_the_process, "too small")):
        with pytest.raises(ArgumentError, match=rf"^{says}$"), asking():
            refuse()
    assert capsys.readouterr() == ("", "")


def test_a_per_cent_sign_that_means_itself_is_shown(parser: Parser) -> None:
    shown = argparse.ArgumentParser(add_help=False, formatter_class=HelpFormatter)
    shown.add_argument("--size", help="at most 100% of it")
    assert "at most 100% of it" in shown.format_help()
