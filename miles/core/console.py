"""What a run shows on the terminal: a line for each rollout, phases while they run, a table."""

import os
import select
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, override

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("len", "rollout/response_len/mean", "{:.1f}"),
    ("loss", "train/loss", "{:+.4f}"),
    ("kl", "train/ppo_kl", "{:.1e}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("lr", "train/lr", "{:.1e}"),
    ("gen s", "perf/rollout_time", "{:.2f}"),
    ("train s", "perf/train_time", "{:.2f}"),
    ("sync s", "perf/update_weights_time", "{:.2f}"),
    ("tok/s", "perf/tokens_per_s", "{:,.0f}"),
)
"""Heading, metric, format of a rollout's line."""


OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""Exit code of a program whose output nobody reads any more (``| head``), as a shell gives it to
one that the signal ends."""


def until_output_closes(program: Callable[[], int]) -> int:
    """Run a program; its exit code, or without a word ``OUTPUT_CLOSED``."""
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()  # Python itself would complain when it ends.
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # It was a connection to another process.
        _discard_output()
        return OUTPUT_CLOSED


def _reader_is_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class _PipedConsole(Console):
    """rich's own ends with code 1, which is that of a failed run."""

    @override
    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        _discard_output()
        raise SystemExit(OUTPUT_CLOSED)


class RunConsole:
    """Prints to standard output; plain lines when it is not a terminal.

    Where nobody reads them any more, the next one raises ``SystemExit``."""

    def __init__(self, num_rollout: int) -> None:
        self._console = _PipedConsole(highlight=False, soft_wrap=True)
        self._num_rollout = num_rollout
        self._width = len(str(num_rollout))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Show what is running and for how long, where the terminal can."""
        if not self._console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(f"{name} …", total=None)
            yield

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """One line for a finished rollout."""
        parts = [
            f"{heading} {form.format(metrics[name])}"
            for heading, name, form in COLUMNS
            if name in metrics
        ]
        label = f"rollout {rollout_id + 1:>{self._width}}/{self._num_rollout}"
        self.say(f"{label}  " + "  ".join(parts))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        scores = "  ".join(f"{k} {v:.3f}" for k, v in sorted(metrics.items()))
        self.say(f"evaluation after {step} rollouts  {scores}")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for column in header:
            table.add_column(column, justify="right" if column != header[0] else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
