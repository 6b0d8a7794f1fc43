"""Launch helpers for recipes: flags as a mapping, a command line, a child process."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from miles.config.errors import ConfigError, Problem
from miles.core import locks, owned
from miles.utils.arguments import read_config, refusal

ROOT = Path(__file__).resolve().parents[3]

STOP_TIMEOUT_S = 120.0
"""A run waits for its engines and its last save, each of them bounded."""

FlagValue = str | int | float | bool | Path | None | Sequence[str | int | float | Path]


def to_argv(flags: Mapping[str, FlagValue]) -> list[str]:
    """``{"num-rollout": 5, "colocate": True, "load": None}`` → ``--num-rollout 5 --colocate``.

    ``True`` is the bare flag; ``None`` and ``False`` leave it out.
    """
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is True:
            continue
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        argv.extend(str(item) for item in values)
    return argv


def with_values_joined(argv: Sequence[str], *options: str) -> list[str]:
    """``--flags "--lr 1"`` becomes ``--flags=--lr 1`` for each of the ``options``: tyro takes a
    value that begins with a dash for a flag of its own."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1].replace("_", "-") in options:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def words_of(option: str, text: str) -> list[str]:
    """The words of more flags that an ``option`` of a recipe takes, parted as a shell does; a
    quote that is left open ends this process."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise refusal(ConfigError([Problem(option, text, f"cannot be parted: {error}")])) from None


def run_train(
    flags: Mapping[str, FlagValue],
    *,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``train.py`` with ``flags`` and ``more`` words behind them; end this process with its
    exit code when it fails."""
    command = [sys.executable, str(ROOT / "train.py"), *to_argv(flags), *more]
    print(f"$ python train.py {shlex.join(command[2:])}", flush=True)
    code = run_owned(command, environment or {})
    if code != 0:
        sys.exit(code)


def delete_run(run_dir: Path) -> None:
    """Delete a run directory; end this process instead when a run is still writing there."""
    try:
        with locks.held(run_dir):
            shutil.rmtree(run_dir)
    except locks.HeldError as error:
        print(f"{run_dir} is not replaced: a run writes there ({error})", file=sys.stderr)
        sys.exit(2)


def require_flags(
    flags: Mapping[str, FlagValue], made: Sequence[Path], *, more: Sequence[str] = ()
) -> None:
    """End this process with code 2 and every problem that ``train.py`` would have with its flags.

    Called before the model and the data of a recipe are ``made``, which takes long: what is said of
    flags that name them is left to ``train.py``.
    """
    try:
        read_config([*to_argv(flags), *more])
    except ConfigError as error:
        places = [str(path) for path in made]
        problems = [p for p in error.problems if not any(x in str(p.value) for x in places)]
        if problems:
            raise refusal(ConfigError(problems)) from None


def run_owned(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """The exit code of a command that ends with this process; called in the main thread.

    SIGINT and SIGTERM are handed on to it, once. It may then take ``stop_timeout_s`` to end what
    it has started before it is killed, and the code is 128 + the signal's number.
    """
    environment = {**os.environ, **environment, owned.OWNER: str(os.getpid())}
    with _signals_raised():
        # In a group of its own: a terminal would send a second Ctrl-C, which cuts the end short.
        process = subprocess.Popen(command, env=environment, process_group=0)
        try:
            code = process.wait()
        except _Signal as received:
            process.send_signal(received.number)
            try:
                process.wait(stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return 128 + received.number
    return code if code >= 0 else 128 - code


class _Signal(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals_raised() -> Generator[None]:
    """The first SIGINT or SIGTERM raises ``_Signal``, later ones do nothing (``timeout`` sends its
    own twice)."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def first(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Signal(number)

    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
