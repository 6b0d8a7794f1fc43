"""The command lines of SGLang's server and of its router, as their own parsers know them.

Each parser is a scratch one: it reads one option at a time and is asked what it has against it.
"""

# pyright: reportMissingImports=false
# sglang and its router are extras.

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from miles.config.command_line import Foreign
from miles.config.foreign_parser import (
    WAYS_TO_FAIL,
    HelpFormatter,
    Parser,
    fault_of,
    silence,
    words_of,
)

SERVER_PREFIX = "--sglang-"
ROUTER_PREFIX = "--router-"


class SurfaceError(RuntimeError):
    """The installed package cannot be imported here; the message is Python's."""


@dataclass(frozen=True)
class Surface:
    """Somebody else's options under a prefix of ours: ``--tp-size`` is ``--sglang-tp-size``."""

    prefix: str
    parser: argparse.ArgumentParser

    @property
    def names(self) -> Mapping[str, str]:
        """Every option by the name that a user types -> the first of its names without dashes."""
        return {
            self.prefixed(option): action.option_strings[0].removeprefix("--")
            for action in self._actions()
            for option in action.option_strings
        }

    def prefixed(self, option: str) -> str:
        return self.prefix + option.removeprefix("--")

    def words(self, flag: Foreign) -> list[str]:
        """A flag of a user as its owner's parser reads it."""
        option = "--" + flag.name.removeprefix(self.prefix)
        return words_of(flag, option)

    def fault(self, words: Sequence[str]) -> str | None:
        """What is wrong with one option and its values; ``None``: nothing."""
        return fault_of(self.parser, words)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Arguments of which none has a fault."""
        with silence():
            return self.parser.parse_args(list(argv))

    def help_text(self, usage: str, description: str, hidden: Set[str]) -> str:
        """Every option under its prefix, but for those ``hidden`` (with their prefix)."""
        shown = argparse.ArgumentParser(
            usage=usage,
            description=description,
            add_help=False,
            formatter_class=_HelpFormatter,
        )
        groups: dict[str, Any] = {}
        for group in self.parser._action_groups:  # pyright: ignore[reportPrivateUsage]
            for action in group._group_actions:  # pyright: ignore[reportPrivateUsage]
                if action.help == argparse.SUPPRESS or action.dest == "help":
                    continue
                if self.prefixed(action.option_strings[0]) in hidden:
                    continue
                title = group.title or ""
                if title not in groups:
                    groups[title] = shown.add_argument_group(title, group.description)
                groups[title]._add_action(_Shown(action, self.prefix))
        return shown.format_help()

    def _actions(self) -> list[argparse.Action]:
        actions = self.parser._actions  # pyright: ignore[reportPrivateUsage]
        return [action for action in actions if action.dest != "help"]


Loader = Callable[[], Surface]


@functools.cache
def server() -> Surface:
    """``python -m sglang.launch_server``. Takes seconds; raises ``SurfaceError``."""
    with _importing():
        from sglang.srt.server_args import ServerArgs

        parser = Parser(allow_abbrev=False)
        ServerArgs.add_cli_args(parser)
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        # It reads one option at a time, which --model-path is not among.
        action.required = False
    return Surface(SERVER_PREFIX, parser)


@functools.cache
def router() -> Surface:
    """``python -m sglang_router.launch_router``. Raises ``SurfaceError``."""
    with _importing():
        from sglang_router.router_args import RouterArgs

        parser = Parser(allow_abbrev=False)
        RouterArgs.add_cli_args(parser)
    return Surface(ROUTER_PREFIX, parser)


class _Shown(argparse.Action):
    """An option as the help shows it: under a prefix. Parses nothing."""

    def __init__(self, action: argparse.Action, prefix: str) -> None:
        super().__init__(
            option_strings=[prefix + o.removeprefix("--") for o in action.option_strings],
            dest=action.dest,
            nargs=action.nargs,
            default=action.default,
            choices=action.choices,
            help=action.help,
            # Not the choices: the names of sixty quantizations are no type.
            metavar=action.metavar or (action.dest.upper() if action.nargs != 0 else None),
        )


class _HelpFormatter(HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=100)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
        default = "" if action.default in (None, False, "", [], {}) else f" [{action.default}]"
        return text + choices + default


@contextlib.contextmanager
def _importing() -> Generator[None]:
    """Imports that leave the environment as it was, which Ray's workers inherit."""
    before = dict(os.environ)
    try:
        with silence():
            yield
    except WAYS_TO_FAIL as error:
        raise SurfaceError(f"{type(error).__name__}: {error}") from error
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
