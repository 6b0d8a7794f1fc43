"""Pictures and tables of a run, from its ``metrics.jsonl``: ``python -m miles.report RUN_DIR``.

Several directories are compared in one picture.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.core.console import RunConsole
from miles.core.tracking import METRICS_FILE, MetricsError, read_metrics

PICTURE_FILE = "reward.png"
COMPARISON = "comparison.png"
REWARD = "rollout/raw_reward"
LOSS = "train/loss"
SMOOTHING_WINDOW = 10
SUMMARY: tuple[tuple[str, str, str], ...] = (
    ("mean reward", REWARD, "{:.3f}"),
    ("loss", LOSS, "{:+.4f}"),
    ("response tokens", "rollout/response_len/mean", "{:.1f}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("policy KL", "train/ppo_kl", "{:.2e}"),
    ("trainer-engine log-prob difference", "train/train_rollout_logprob_abs_diff", "{:.2e}"),
    ("seconds generating", "perf/rollout_time", "{:.2f}"),
    ("seconds training", "perf/train_time", "{:.2f}"),
    ("seconds syncing weights", "perf/update_weights_time", "{:.2f}"),
)


def series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], window: int = SMOOTHING_WINDOW) -> list[float]:
    """Trailing mean."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw_reward(run_dir: Path, path: Path | None = None) -> Path | None:
    """Write ``reward.png`` into the run's directory, or ``path``; ``None`` when the run recorded no
    reward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(run_dir)
    steps, rewards = series(rows, REWARD)
    if not steps:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(rewards), color="tab:blue", linewidth=2, label="sampled reward")
    names = sorted({key for row in rows for key in row if _is_eval_score(key)})
    for position, name in enumerate(names):
        color = f"C{position + 1}"
        axes.plot(*series(rows, name), color=color, marker="o", markersize=4, label=name)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("mean reward")
    axes.set_title(run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    path = path or run_dir / PICTURE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def draw_comparison(runs: Mapping[str, Path], path: Path) -> Path:
    """Write the reward curves and the losses of several runs, by label, to one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7))
    for position, (label, run_dir) in enumerate(runs.items()):
        rows, color = read_metrics(run_dir), f"C{position}"
        for axes, name in ((top, REWARD), (bottom, LOSS)):
            steps, values = series(rows, name)
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
            axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
    top.set_ylabel("mean reward")
    bottom.set_ylabel("loss")
    bottom.set_xlabel("rollouts")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def summarize(run_dir: Path, console: RunConsole, num_ends: int = 25) -> None:
    """Print first against last rollouts, at most half of them each."""
    rows = [row for row in read_metrics(run_dir) if row["step"] > 0]
    ends = min(num_ends, max(1, len(rows) // 2))
    # The loss of training on rewards says nothing about progress.
    left_out = LOSS if series(rows, REWARD)[1] else None
    table: list[list[str]] = []
    for label, name, form in SUMMARY:
        _, values = series(rows, name)
        if values and name != left_out:
            first, last = statistics.fmean(values[:ends]), statistics.fmean(values[-ends:])
            table.append([label, form.format(first), form.format(last)])
    if table:
        console.table(
            f"Means of the first {ends} and the last {ends} rollouts", ["", "first", "last"], table
        )


def _is_eval_score(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--picture",
        type=Path,
        help=f"where it goes; default: {PICTURE_FILE} in RUN_DIR, of several {COMPARISON} here",
    )
    arguments = parser.parse_args(argv)
    for run_dir in arguments.run_dirs:
        if not (run_dir / METRICS_FILE).is_file():
            parser.error(f"{run_dir} has no {METRICS_FILE}: give the --run-dir of a run")
    try:
        _report(arguments.run_dirs, arguments.picture)
    except MetricsError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        reason = f"{error.filename or arguments.picture}: {error.strerror}"
        remedy = "name a file that can be written with --picture"
        print(f"{parser.prog}: the picture cannot be written: {reason}; {remedy}", file=sys.stderr)
        raise SystemExit(2) from None


def _report(run_dirs: Sequence[Path], picture_file: Path | None) -> None:
    console = RunConsole(0)
    for run_dir in run_dirs:
        if len(run_dirs) > 1:
            console.say(str(run_dir))
        summarize(run_dir, console)
    if len(run_dirs) > 1:
        runs = {str(run_dir): run_dir for run_dir in run_dirs}
        picture = draw_comparison(runs, picture_file or Path(COMPARISON))
    else:
        (run_dir,) = run_dirs
        picture = draw_reward(run_dir, picture_file)
    if picture is not None:
        console.say(f"picture: {picture}")


if __name__ == "__main__":
    main()
