"""A file that belongs to one process, read and written in large pieces past the page cache.

It has no name in its directory, so that the kernel removes it with the process, however that ends.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from miles.core import logging

ALIGNMENT = 4096
"""Of offsets, lengths and buffers, as direct I/O wants them."""
_FLAG = "--offload-train-disk-dir"

log = logging.get(__name__)


class OffloadError(RuntimeError):
    """State could not be moved to the disk or back; names the flag, the directory and a remedy."""


class DirectFile:
    """Bytes at offsets. Direct I/O where the file system has it, else through the page cache."""

    def __init__(self, directory: str) -> None:
        """Raises ``OffloadError``."""
        self._directory = directory
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._fd = _open_direct(directory)
        except OSError as error:
            raise self._failed("no file can be made", error) from error
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for so many bytes, so that no write finds the disk full. Raises
        ``OffloadError`` and leaves the file as it was."""
        if num_bytes <= self._num_bytes:
            return
        try:
            with _through_page_cache(self._fd):
                os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            os.ftruncate(self._fd, self._num_bytes)
            raise self._failed(f"no room for {num_bytes / 2**30:.2f} GiB", error) from error
        self._num_bytes = num_bytes

    def write(self, buffer: Tensor, offset: int) -> None:
        """Write an aligned uint8 buffer at an aligned offset. Raises ``OffloadError``."""
        try:
            done = os.pwrite(self._fd, memoryview(buffer.numpy()), offset)
        except OSError as error:
            raise self._failed("writing", error) from error
        self._require_whole("written", done, buffer)

    def read(self, buffer: Tensor, offset: int) -> None:
        """Fill an aligned uint8 buffer from an aligned offset. Raises ``OffloadError``."""
        try:
            done = os.preadv(self._fd, [memoryview(buffer.numpy())], offset)
        except OSError as error:
            raise self._failed("reading", error) from error
        self._require_whole("read", done, buffer)

    def mapped(self) -> Tensor:
        """The reserved bytes as a uint8 tensor that shares memory with the file.

        Coherent with ``read`` and ``write`` as long as nobody does both at a time.
        """
        return torch.frombuffer(mmap.mmap(self._fd, self._num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _require_whole(self, what: str, done: int, buffer: Tensor) -> None:
        if done != buffer.numel():
            raise OffloadError(
                f"{_FLAG} {self._directory}: {what} {done} of {buffer.numel()} bytes"
            )

    def _failed(self, what: str, error: OSError) -> OffloadError:
        remedy = "give another directory"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space there, or give a directory of a larger disk"
        return OffloadError(f"{_FLAG} {self._directory}: {what}: {error.strerror}; {remedy}")


def align_up(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _open_direct(directory: str) -> int:
    descriptor = _open_nameless(directory)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("%s %s: no direct I/O there; it goes through memory", _FLAG, directory)
    return descriptor


def _open_nameless(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = Path(directory) / f"miles_{os.getpid()}_{os.urandom(4).hex()}"
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    name.unlink()
    return descriptor


@contextmanager
def _through_page_cache(descriptor: int) -> Generator[None]:
    """Where the file system cannot reserve, the C library writes single bytes."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
