"""A directory held for the life of a process: a second run that would write there is told so."""

import errno
import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from miles.core import logging

FILE = ".lock"
"""In each directory that is or was held; says by which process on which host."""

_NOT_LOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer (Lustre mounted without ``flock``)."""

log = logging.get(__name__)


class HeldError(RuntimeError):
    """Another process holds the directory. The message says which."""


@contextmanager
def held(folder: Path) -> Generator[None]:
    """Hold ``folder``, which is there. The kernel lets go of it when the process ends in any way.

    Raises ``HeldError``, and ``OSError`` where no file can be made.
    """
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1024, 0).decode(errors="replace").strip()
        raise HeldError(holder or "another process") from None
    except OSError as error:
        if error.errno not in _NOT_LOCKABLE:
            raise
        log.warning("%s cannot be locked (%s): nothing keeps a second run out", folder, error)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
