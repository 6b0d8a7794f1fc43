"""Launch helpers for recipes: flags as a mapping, a command line, a child process."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

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


def run_train(
    flags: Mapping[str, FlagValue], *, environment: Mapping[str, str] | None = None
) -> None:
    """Run ``train.py`` with ``flags``; end this process with its exit code when it fails."""
    command = [sys.executable, str(ROOT / "train.py"), *to_argv(flags)]
    print(f"$ python train.py {shlex.join(command[2:])}", flush=True)
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()
    if code != 0:
        sys.exit(code)
