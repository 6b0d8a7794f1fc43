"""What the copy engine and a disk give by themselves."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from miles.backends.training_utils.direct_file import DirectFile
from miles.core import device, host_memory


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second."""

    to_host: float
    to_device: float
    to_new_memory: float
    """A copy into memory that was used before and is allocated anew: the driver clears it first, on
    the engine that copies."""
    write: float
    read: float
    write_beside_read: float
    """Of a disk that does both: each moved as many bytes in the same time."""


def mean_of(measured: Sequence[Ceilings]) -> Ceilings:
    return Ceilings(*map(statistics.fmean, zip(*map(astuple, measured), strict=True)))


def timed(action: Callable[[], Any]) -> float:
    device.synchronize()
    start = time.perf_counter()
    action()
    device.synchronize()
    return time.perf_counter() - start


def measure_ceilings(disk_dir: Path, num_bytes: int, chunk: int) -> Ceilings:
    """By transfers of ``num_bytes``, on disk in pieces of ``chunk`` bytes."""
    host = host_memory.allocate(num_bytes)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.current_device())
    to_host = min(timed(lambda: host.copy_(there, non_blocking=True)) for _ in range(3))
    to_device = min(timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(3))
    to_new_memory = min(_copy_to_new_memory(host) for _ in range(3))
    files = [DirectFile(str(disk_dir)) for _ in range(2)]
    pieces = [(host[at : at + chunk], at) for at in range(0, num_bytes, chunk)]

    def write(file: DirectFile) -> None:
        for piece, at in pieces:
            file.write(piece, at)

    def read(file: DirectFile) -> None:
        for piece, at in pieces:
            file.read(piece, at)

    for file in files:
        file.reserve(num_bytes)
        write(file)
    write_s, read_s = timed(lambda: write(files[0])), timed(lambda: read(files[0]))

    def both() -> None:
        with ThreadPoolExecutor(2) as threads:
            for done in (threads.submit(read, files[0]), threads.submit(write, files[1])):
                done.result()

    both_s = timed(both)
    for file in files:
        file.close()
    seconds = (to_host, to_device, to_new_memory, write_s, read_s, both_s)
    return Ceilings(*(num_bytes / s for s in seconds))


def _copy_to_new_memory(host: torch.Tensor) -> float:
    """Seconds, into memory that was used before."""
    where = device.current_device()
    torch.ones_like(host, device=where)
    device.empty_cache()
    new = torch.empty_like(host, device=where)
    return timed(lambda: new.copy_(host, non_blocking=True))
