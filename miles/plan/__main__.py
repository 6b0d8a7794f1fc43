"""``python -m miles.plan`` with the flags of ``train.py``: how much memory each phase takes, what
does not fit, and which flag to turn. Needs neither an accelerator nor weights."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from rich.console import Console

from miles.config.errors import ConfigError, Problem
from miles.core import device
from miles.plan.forecast import forecast
from miles.plan.memory import GIB
from miles.plan.read import read_job
from miles.plan.remedies import remedies
from miles.plan.table import as_values, show
from miles.utils.arguments import read_config, refusal

H200_BYTES = int(139.8 * GIB)
"""Of its 141 GB, what a process can have."""


def make_parser() -> argparse.ArgumentParser:
    """The planner's own flags; all others are those of ``train.py``."""
    parser = argparse.ArgumentParser(
        prog="python -m miles.plan",
        usage="%(prog)s [--device-memory-gb GIB] [--host-memory-gb GIB] [--json] FLAGS OF train.py",
        description="Forecast the memory of a run. Of --hf-checkpoint it reads config.json alone. "
        "Ends with 0 where everything fits, 1 where something does not, 2 for bad flags.",
        allow_abbrev=False,
    )
    # Read as text, and a value may lack: what is wrong with them is told beside all the rest.
    parser.add_argument(
        "--device-memory-gb",
        nargs="?",
        const="",
        metavar="GIB",
        help="Memory of a device; by default this machine's, without one an H200's 139.8.",
    )
    parser.add_argument(
        "--host-memory-gb",
        nargs="?",
        const="",
        metavar="GIB",
        help="Memory of a machine; by default the host is not judged.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object, in bytes.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = make_parser().parse_known_args(argv)
    try:
        device_bytes, host_bytes = _sizes(options, flags)
        config, messages = read_config(flags, runs_here=False)
        if config.observability.debug_rollout_only:
            remedy = "trains nothing; leave it out to forecast the whole run"
            raise ConfigError([Problem("--debug-rollout-only", True, remedy)])
        job = read_job(
            config,
            device_bytes=device_bytes or device.capacity_bytes() or H200_BYTES,
            host_bytes=host_bytes,
        )
    except ConfigError as error:
        raise refusal(error, "miles.plan") from None
    phases, found = forecast(job), remedies(job)
    if options.json:
        print(json.dumps(as_values(job, phases, found), indent=2))
    else:
        for message in messages:
            print(message.text, file=sys.stderr)
        show(Console(), job, phases, found)
    return 0 if all(phase.fits for phase in phases) else 1


def _sizes(options: argparse.Namespace, flags: Sequence[str]) -> tuple[int | None, int | None]:
    """Bytes of a device and of a host; ``None``: not given. Raises ``ConfigError``, with what is
    wrong with the other flags too."""
    given = {
        "--device-memory-gb": options.device_memory_gb,
        "--host-memory-gb": options.host_memory_gb,
    }
    wrong = [
        Problem(flag, text, "must be a number above 0: GiB")
        for flag, text in given.items()
        if text is not None and _gib(text) is None
    ]
    if wrong:
        try:
            read_config(flags, runs_here=False)
        except ConfigError as error:
            wrong += error.problems
        raise ConfigError(wrong)
    device_gib, host_gib = [None if text is None else _gib(text) for text in given.values()]
    return _bytes(device_gib), _bytes(host_gib)


def _gib(text: str) -> float | None:
    """``None``: it is no amount."""
    try:
        gib = float(text)
    except ValueError:
        return None
    return gib if 0 < gib < math.inf else None


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


if __name__ == "__main__":
    sys.exit(main())
