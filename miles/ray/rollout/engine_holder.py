"""The actor that owns a server process; it imports no PyTorch, which takes seconds."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.core import device_environment, ports

STOP_TIMEOUT_S = 10.0
LAST_LINES = 15


@dataclass(frozen=True, kw_only=True)
class EngineLaunch:
    """How to start one server: an engine's, or the router's."""

    arguments: tuple[str, ...]
    """Of the Python that its holder runs in, on whatever machine. Without ``--ready-file`` and
    ``--parent-pid``, which the holder adds and every server of ours takes."""
    environment: Mapping[str, str]
    log_file: str
    start_timeout_s: float
    """From the start of its process until it serves."""
    device_ids: tuple[int, ...] = ()
    """Physical ids of the devices that it sees; empty: those that its holder sees."""


class EngineHolder:
    """Ray actor that owns one server process, an engine's or the router's; when it ends, so does
    the server."""

    def __init__(self, what: str) -> None:
        """``what`` the server is, for messages."""
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file = Path(os.devnull)
        self._held_port: socket.socket | None = None

    def hold_port(self, host: str) -> int:
        """A port of this machine that nobody else is given while this holder lives, for a server
        of it to listen at."""
        self._held_port = ports.hold_port(host)
        return self._held_port.getsockname()[1]

    def start(self, launch: EngineLaunch) -> str:
        """Start the server and return its URL once it is ready."""
        self._log_file = Path(launch.log_file)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="miles-engine-") as folder:
            ready = Path(folder) / "ready.json"
            owned = ("--ready-file", str(ready), "--parent-pid", str(os.getpid()))
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *launch.arguments, *owned],
                    env=_environment(launch),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            return self._wait_until_ready(ready, launch.start_timeout_s)

    def alive(self) -> bool:
        """Does not reap a server that ended: until ``stop`` its process group keeps its id."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is None
        except ChildProcessError:  # `stop`, in the other thread, has just reaped it.
            return False

    def last_lines(self) -> str:
        """The server's own last words."""
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def _how_it_ended(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        if status is None or status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name
        killer = ": if nobody else, the kernel, for want of memory" if name == "SIGKILL" else ""
        return f"by signal {name}{killer}"

    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the server with all its processes: politely, then for good."""
        if self._process is None or self._process.returncode is not None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if self.alive():
            os.kill(self._process.pid, signal.SIGTERM)
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)

    def _wait_until_ready(self, ready: Path, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not ready.exists():
            if not self.alive():
                self.stop()
                raise RuntimeError(
                    f"{self._what} ended at start, {self._how_it_ended()}; the end of its log "
                    f"{self._log_file}:\n{self.last_lines() or '(empty)'}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"{self._what} was not ready in {timeout_s:g} s "
                    "(--rollout-engine-start-timeout-s); its last lines:\n" + self.last_lines()
                )
            time.sleep(0.05)
        return json.loads(ready.read_text(encoding="utf-8"))["url"]


def _environment(launch: EngineLaunch) -> dict[str, str]:
    """This process's, but with all devices of the server: Ray shows the holder one of them."""
    devices = device_environment.only_devices(launch.device_ids) if launch.device_ids else {}
    return {**os.environ, **launch.environment, **devices}
