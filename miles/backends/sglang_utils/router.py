"""``python -m miles.backends.sglang_utils.router``: one released SGLang router that has an owner.

Like ``server.py`` it listens on a port that it holds, on loopback, tells its URL through
``--ready-file``, and ends when ``--parent-pid`` does. Its workers are registered afterwards.

The router is a process of its own below this one: it never gives Python's lock back, so no thread
beside it could watch anything.
"""

# pyright: reportMissingImports=false
# The router comes with the extra that SGLang comes with.

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any, cast

from miles.backends.sglang_utils.server import follow_owner, parse_args, run
from miles.core.ports import hold_port, host_and_port

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Route until a failure; a signal or the parent's end ends both processes before that."""
    args, router_argv = parse_args(argv)
    # Metrics have a port of their own, and a fixed one would be another job's.
    held = [hold_port(args.host), hold_port(args.host)]
    port, metrics_port = (str(each.getsockname()[1]) for each in held)
    metrics = ["--prometheus-host", args.host, "--prometheus-port", metrics_port]
    above = os.getpid()
    # While there is but one thread.
    router = os.fork()
    if router == 0:
        end_with(above)
        serve([*metrics, *router_argv, "--host", args.host, "--port", port])
        os._exit(1)
    follow_owner(args, f"http://{host_and_port(args.host, int(port))}")
    os.waitpid(router, 0)


def end_with(parent: int) -> None:
    """Have this process killed when the main thread of its parent ends, however that does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(router_argv: Sequence[str]) -> None:
    """What ``python -m sglang_router.launch_router`` does."""
    from sglang_router.launch_router import launch_router, parse_router_args

    # It takes what its own parser returns, too; the annotation leaves that out.
    launch_router(cast("Any", parse_router_args(list(router_argv))))


if __name__ == "__main__":
    run(main)
