"""Command-line parsers of somebody else, asked as functions: what they print and how they stop
reaches nobody but the caller, as one kind of error."""

import argparse
import contextlib
import io
import re
import traceback
import warnings
from collections.abc import Generator, Sequence
from typing import NoReturn

from miles.config.command_line import Foreign


class ArgumentError(ValueError):
    """A parser or a validation refused its arguments; the message is its own."""


WAYS_TO_FAIL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What somebody else's code raises for values that it cannot work with, or beside packages that do
not fit."""


class Parser(argparse.ArgumentParser):
    """Raises ``ArgumentError`` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


class HelpFormatter(argparse.HelpFormatter):
    """Shows a text also where it has a per cent sign that means itself."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError):
            return action.help or ""


def words_of(flag: Foreign, option: str) -> list[str]:
    """A user's flag as its owner's parser reads it, under the owner's name for it."""
    if len(flag.words) == 1 and flag.words[0].startswith("-"):
        return [f"{option}={flag.words[0]}"]
    return [option, *flag.words]


def fault_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """What is wrong with one option and its values; ``None``: nothing."""
    try:
        with asking():
            _, extras = parser.parse_known_args(list(words))
    except ArgumentError as error:
        return re.sub(r"^argument [^:]*: ", "", str(error))
    return f"takes no further value: {' '.join(extras)}" if extras else None


@contextlib.contextmanager
def asking() -> Generator[None]:
    """Every way to refuse as ``ArgumentError``; what is printed is that error's text or lost."""
    with silence() as (printed, complaints):
        try:
            yield
        except SystemExit as stop:
            text = (complaints.getvalue() or printed.getvalue()).strip()
            raise ArgumentError(text.rpartition("error: ")[2] or str(stop)) from stop
        except WAYS_TO_FAIL as error:
            raise ArgumentError(str(error) or _source_line(error)) from error


@contextlib.contextmanager
def silence() -> Generator[tuple[io.StringIO, io.StringIO]]:
    """Takes what is printed (standard output, errors), and drops warnings."""
    printed, complaints = io.StringIO(), io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complaints),
    ):
        warnings.simplefilter("ignore")
        yield printed, complaints


def _source_line(error: BaseException) -> str:
    """An assertion without a message is its own best description."""
    return traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
