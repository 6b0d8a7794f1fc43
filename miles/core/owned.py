"""A server process that another process owns: it says when it is ready, and ends with its owner."""

import os
from pathlib import Path

import msgspec
import psutil


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
