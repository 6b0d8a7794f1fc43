"""A process that another one owns: a server says when it is ready, and all end with the owner."""

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import psutil

OWNER = "MILES_OWNER_PID"
"""Environment variable: the process that this one is to end with."""

WATCH_INTERVAL_S = 0.5


def write_ready_file(path: Path, url: str) -> None:
    """Atomically: a reader sees nothing or all of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode({"url": url, "pid": os.getpid()}))
    partial.replace(path)


class Owner:
    """The owning process, to be asked now and then whether it lives.

    Polling, not PR_SET_PDEATHSIG: that one fires when the *thread* that started this process ends.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def lives(self) -> bool:
        if self._process is None:
            return False
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def end_with_owner() -> None:
    """Send SIGTERM to this process once that of ``OWNER`` has ended, if the variable is there.

    Takes it out of the environment: processes started from here have this one as their owner.
    """
    pid = os.environ.pop(OWNER, None)
    if pid is not None:
        threading.Thread(target=_watch, args=(Owner(int(pid)),), daemon=True).start()


def interrupt_on_sigterm() -> None:
    """The first SIGTERM raises ``KeyboardInterrupt`` in the main thread; later ones do nothing:
    ``timeout`` sends its own twice, and a second would cut short what the first began."""
    received = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal received
        if not received:
            received = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _watch(owner: Owner) -> None:
    while owner.lives():
        time.sleep(WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
