"""``python -m miles.backends.embedded.server``: one engine process behind SGLang's HTTP protocol.

It listens at one address, by default on loopback (it has no authentication), tells its URL through
``--ready-file`` once the model is loaded, and ends when ``--parent-pid`` does.
"""

import argparse
import errno
import gc
import ipaddress
import logging as std_logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from transformers.utils import logging as transformers_logging

from miles.backends.embedded.api import Holder, make_app
from miles.backends.embedded.engine import Engine, EngineSettings
from miles.core import logging
from miles.core.owned import Owner, write_ready_file
from miles.rollout.engine_client import http_url

log = logging.get(__name__)

WATCH_INTERVAL_S = 0.5
SHUTDOWN_GRACE_S = 3.0
DROP_AFTER_S = 1
"""Requests in flight never get an answer once the scheduler is stopped."""


class Server(uvicorn.Server):
    """uvicorn, with the engine loaded beside it and stopped before it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.holder = Holder()
        self.failure: str | None = None
        self.finished = threading.Event()

    def end(self, failure: str | None = None) -> None:
        """Begin to shut down; safe from any thread. What comes first is why it ends: a scheduler
        that is found dead after a signal was stopped by it.
        """
        if not self.should_exit:
            self.failure = failure
        self.should_exit = True
        engine = self.holder.engine
        if engine is not None:
            # In another thread: a signal must not wait for a step.
            threading.Thread(
                target=engine.scheduler.stop, args=(SHUTDOWN_GRACE_S,), daemon=True
            ).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # No answer at all, instead of uvicorn's 500: clients take the engine for dead and send the
        # request to another one.
        for connection in list(self.server_state.connections):
            connection.transport.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        self.end()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1", help="an address of this machine")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--ready-file", type=Path, help="gets {url, pid} when the model is loaded")
    parser.add_argument("--dtype", default="auto", choices=["auto", *_DTYPES])
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--max-running-requests", type=_positive, default=256)
    parser.add_argument(
        "--max-total-tokens", type=_positive, help="size of the key/value cache; default: by memory"
    )
    parser.add_argument(
        "--admission-timeout-s", type=float, default=60.0, help="see --deterministic-rollout"
    )
    parser.add_argument(
        "--log-level", default="warning", choices=["debug", "info", "warning", "error", "critical"]
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    parser.add_argument("--parent-pid", type=_positive, help="end when this process does")
    return parser.parse_args(argv)


_DTYPES = ("float32", "bfloat16", "float16")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on one address of this machine; port 0 lets the kernel choose a free one.

    Raises ``ValueError`` that names the flag.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError as error:
        raise ValueError(f"--host {host}: not an IP address") from error
    if address.is_unspecified:
        raise ValueError(
            f"--host {host}: the engine has no authentication and does not listen on every "
            "interface; name the address that its clients use"
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # With the protocol named: asyncio turns Nagle off (40 ms a small answer) only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"--host {host}: not an address of this machine") from error
        raise ValueError(f"--port {port}: {error.strerror} (0 takes a free port)") from error
    return listener


def _load(server: Server, settings: EngineSettings, ready_file: Path | None, url: str) -> None:
    transformers_logging.disable_progress_bar()
    try:
        server.holder.engine = Engine(settings)
    except Exception as error:  # the process ends with it; nothing else can be done here
        log.debug("loading failed", exc_info=error)
        server.end(f"cannot serve {settings.model_path}: {type(error).__name__}: {error}")
        return
    if server.should_exit:
        server.end()
        return
    # What is loaded stays: full collections would take longer than steps.
    gc.collect()
    gc.freeze()
    if ready_file is not None:
        write_ready_file(ready_file, url)
    log.info("%s serves %s", url, settings.model_path)


def _watch(server: Server, parent_pid: int | None) -> None:
    """End when the parent or the scheduler has ended."""
    parent = None if parent_pid is None else Owner(parent_pid)
    while not (server.finished.wait(WATCH_INTERVAL_S) or server.should_exit):
        if parent is not None and not parent.lives():
            server.end("the parent process ended")
        engine = server.holder.engine
        if engine is not None and not engine.scheduler.alive:
            server.end("the scheduler ended; see the log above")
    # A collective that waits for a dead trainer, or a client that holds its connection, must not
    # keep the process.
    if not server.finished.wait(2 * SHUTDOWN_GRACE_S):
        os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, the parent's end or a failure; returns the exit status."""
    args = parse_args(argv)
    level = std_logging.getLevelNamesMapping()[args.log_level.upper()]
    logging.setup(f"engine {os.getpid()}", level)
    try:
        listener = bind(args.host, args.port)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    url = http_url(*listener.getsockname()[:2])
    settings = EngineSettings(
        model_path=args.model_path,
        dtype=args.dtype,
        context_length=args.context_length,
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        admission_timeout_s=args.admission_timeout_s,
        device=args.device,
    )
    server = Server(
        uvicorn.Config(
            app=None,  # pyright: ignore[reportArgumentType] - set below, it needs the holder
            log_level=args.log_level,
            # Its own configuration would close the handlers of the process it runs in.
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DROP_AFTER_S,
        )
    )
    server.config.app = make_app(server.holder)
    for target, arguments in (
        (_load, (server, settings, args.ready_file, url)),
        (_watch, (server, args.parent_pid)),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    server.run(sockets=[listener])
    server.finished.set()
    if server.failure is not None:
        print(f"error: {server.failure}", file=sys.stderr)
    return 0 if server.failure is None else 1


if __name__ == "__main__":
    # uvicorn raises the signals it caught once more after a clean shutdown.
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda *_: None)
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: threads of a collective may still wait, and must not be joined.
    os._exit(status)
