"""What a run shows on the terminal: a line for each rollout, phases while they run, a table."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

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


class RunConsole:
    """Prints to standard output; plain lines when it is not a terminal."""

    def __init__(self, num_rollout: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
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
