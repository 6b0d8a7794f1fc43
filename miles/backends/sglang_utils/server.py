"""``python -m miles.backends.sglang_utils.server``: one released SGLang server that has an owner.

It takes the arguments of ``sglang.launch_server`` but for the port, listens at ``--host`` on a port
that it holds, tells its URL through ``--ready-file`` once it answers, and ends with all its
processes when ``--parent-pid`` does or at SIGTERM.

The process of a further node of an engine (``--node-rank`` above 0) serves no requests, but SGLang
answers ``/health`` there too once its part of the model is loaded.

SGLang starts its scheduler and detokenizer by importing this module anew, so it imports little.
"""

# pyright: reportMissingImports=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

import argparse
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType

from miles.core.ports import LOOPBACK, hold_port, host_and_port

POLL_S = 0.2
WATCH_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 30.0
"""SGLang answers by generating a token, and the first one takes longest."""


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our arguments, and those for SGLang."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ready-file", type=Path, required=True, help="gets {url, pid}")
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process does")
    parser.add_argument("--host", default=LOOPBACK, help="an address of this machine")
    return parser.parse_known_args(argv)


def answers(url: str) -> bool:
    """Whether the server is up and healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


_ending = threading.Lock()


def end(status: int) -> None:
    """End this process and all that it started, at once.

    SGLang's own shutdown waits for requests in flight, which a paused engine never finishes. The
    first reason counts: children that are killed here must not look like a failure elsewhere.
    """
    import psutil

    _ending.acquire()
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(status)


def _end_on_signal() -> None:
    """SIGTERM and SIGINT are blocked in every thread, so that none of SGLang's handlers sees
    them."""
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    end(0)


def _end_with_parent(parent_pid: int) -> None:
    from miles.core.owned import Owner

    parent = Owner(parent_pid)
    while parent.lives():
        time.sleep(WATCH_INTERVAL_S)
    end(1)


def _tell_when_ready(ready_file: Path, url: str) -> None:
    """Whoever waits for it has the time-out."""
    from miles.core.owned import write_ready_file

    while not answers(url):
        time.sleep(POLL_S)
    write_ready_file(ready_file, url)


def follow_owner(args: argparse.Namespace, url: str) -> None:
    """From now on tell when ``url`` answers, and end with the owner or at a signal."""
    # When it starts it leaves both signals unblocked.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    for target, arguments in (
        (_end_on_signal, ()),
        (_end_with_parent, (args.parent_pid,)),
        (_tell_when_ready, (args.ready_file, url)),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a failure; a signal or the parent's end ends the process before that."""
    args, sglang_argv = parse_args(argv)
    held = [hold_port(args.host), hold_port(args.host)]
    port, store_port = (each.getsockname()[1] for each in held)
    follow_owner(args, f"http://{host_and_port(args.host, port)}")
    serve([*sglang_argv, "--host", args.host, "--port", str(port), "--nccl-port", str(store_port)])


def serve(sglang_argv: Sequence[str]) -> None:
    """What ``python -m sglang.launch_server`` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(list(sglang_argv)))


def _end_with_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, trace)
    end(1)


def run(main: Callable[[], None]) -> None:
    """Not to a normal exit: that would wait for SGLang's processes and threads."""
    sys.excepthook = _end_with_traceback
    try:
        main()
    except SystemExit as stopped:
        end(stopped.code if isinstance(stopped.code, int) else 1)
    end(1)


if __name__ == "__main__":
    run(main)
