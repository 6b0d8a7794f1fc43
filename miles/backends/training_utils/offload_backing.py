"""Where the bytes of a sleeping trainer lie: pinned host memory, or a file on a local disk."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from miles.backends.training_utils.direct_file import (
    ALIGNMENT,
    DirectFile,
    align_up,
)
from miles.core import device, host_memory

_PLACE_ALIGNMENT = 64
"""Of one storage behind another in the file."""


@dataclass(frozen=True)
class Part:
    """One storage that leaves the device; views of it may have many names."""

    key: str
    """The same in every cycle."""
    storage: torch.UntypedStorage
    num_bytes: int
    where: torch.device

    def device_bytes(self) -> Tensor:
        """uint8 ``[num_bytes]``, sharing memory with the storage, which has its full size."""
        return torch.empty(0, dtype=torch.uint8, device=self.where).set_(self.storage)


class Backing(Protocol):
    """Bytes of parts by their keys."""

    def save(self, groups: Sequence[Sequence[Part]]) -> None:
        """Take the bytes over; they are safe when this returns. The storages stay as they are, also
        when it raises ``OffloadError``. What is a group is one in every cycle; other calls may save
        the groups one by one."""
        ...

    def load(self, parts: Sequence[Part]) -> None:
        """Fill storages that have their full size again. The device may still be at it when this
        returns."""
        ...

    def read(self, part: Part, start: int, target: Tensor) -> None:
        """Fill the uint8 ``target`` on the device from byte ``start`` of the part."""
        ...

    def forget(self, parts: Sequence[Part]) -> None:
        """Give back the memory or space that parts took, where that is possible."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


@dataclass
class _Group:
    """Parts that were saved together first, one behind the other in slabs of equal size."""

    places: dict[str, tuple[int, int]]
    """Offset and size by key."""
    slabs: list[Tensor]


class HostBacking:
    """Host memory, pinned with an accelerator and kept from cycle to cycle: pinning costs half a
    second a GiB. It comes in slabs, since PyTorch rounds pinned sizes up to powers of two."""

    def __init__(self, slab_bytes: int = 256 << 20) -> None:
        self._slab_bytes = slab_bytes
        self._groups: list[_Group] = []

    @property
    def num_bytes(self) -> int:
        """Held."""
        return sum(slab.numel() for group in self._groups for slab in group.slabs)

    def save(self, groups: Sequence[Sequence[Part]]) -> None:
        for parts in groups:
            self._make_room(parts)
        for part in chain.from_iterable(groups):
            for held, outside in self._pieces(part, 0, part.device_bytes()):
                held.copy_(outside, non_blocking=True)
        device.synchronize()

    def load(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for held, outside in self._pieces(part, 0, part.device_bytes()):
                outside.copy_(held, non_blocking=True)
        if not device.has_accelerator():
            # Nothing was pinned: there is nothing to gain by holding it.
            self.forget(parts)

    def read(self, part: Part, start: int, target: Tensor) -> None:
        # The slabs stay as they are until the device, in its order, comes to the next sleep.
        for held, outside in self._pieces(part, start, target):
            outside.copy_(held, non_blocking=True)

    def forget(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for group in self._groups:
                group.places.pop(part.key, None)
        kept = [group for group in self._groups if group.places]
        if len(kept) < len(self._groups):
            self._groups = kept
            _give_back_host_memory()

    def close(self) -> None:
        self._groups.clear()
        _give_back_host_memory()

    def _make_room(self, parts: Sequence[Part]) -> None:
        held = {key: size for group in self._groups for key, (_, size) in group.places.items()}
        new = [part for part in parts if held.get(part.key) != part.num_bytes]
        if not new:
            return
        self.forget(new)
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for part in new:
            places[part.key] = (end, part.num_bytes)
            end += -(-part.num_bytes // _PLACE_ALIGNMENT) * _PLACE_ALIGNMENT
        pinned = device.has_accelerator()
        slabs = [
            torch.empty(min(self._slab_bytes, end - start), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, end, self._slab_bytes)
        ]
        self._groups.append(_Group(places, slabs))

    def _pieces(self, part: Part, start: int, outside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What is held from byte ``start`` of the part on, beside the bytes of ``outside``."""
        group = next(group for group in self._groups if part.key in group.places)
        position, done = group.places[part.key][0] + start, 0
        while done < outside.numel():
            slab, at = divmod(position + done, self._slab_bytes)
            count = min(outside.numel() - done, self._slab_bytes - at)
            yield group.slabs[slab][at : at + count], outside[done : done + count]
            done += count


@dataclass
class _Window:
    """A stretch of the file that is moved at once, and the pieces of parts in it."""

    start: int
    end: int
    pieces: list[tuple[Part, int, int, int]] = field(default_factory=list)
    """Part, first byte in it, first byte in the window, number of bytes."""


class DiskBacking:
    """A file, written and read through two host buffers of ``chunk_bytes``: while the device copies
    into or out of one, the disk has the other."""

    def __init__(self, directory: str, chunk_bytes: int) -> None:
        """Raises ``OffloadError``."""
        self._file = DirectFile(directory)
        self._chunk_bytes = align_up(chunk_bytes)
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        self._buffers: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")

    def save(self, groups: Sequence[Sequence[Part]]) -> None:
        for parts in groups:
            self._place(parts)
        self._file.reserve(self._end)
        pending: list[Future[None] | None] = [None, None]
        try:
            for number, window in enumerate(self._windows(list(chain.from_iterable(groups)))):
                slot = number % 2
                _finish(pending[slot])
                buffer = self._buffer(slot, window)
                for part, first, at, count in window.pieces:
                    source = part.device_bytes()[first : first + count]
                    buffer[at : at + count].copy_(source, non_blocking=True)
                device.synchronize()
                pending[slot] = self._thread.submit(self._file.write, buffer, window.start)
        finally:
            wait([one for one in pending if one is not None])
        for one in pending:
            _finish(one)

    def load(self, parts: Sequence[Part]) -> None:
        windows = list(self._windows(parts))
        ahead = self._read_ahead(windows, 0)
        for number, window in enumerate(windows):
            _finish(ahead)
            ahead = self._read_ahead(windows, number + 1)
            buffer = self._buffer(number % 2, window)
            for part, first, at, count in window.pieces:
                target = part.device_bytes()[first : first + count]
                target.copy_(buffer[at : at + count], non_blocking=True)
            device.synchronize()

    def read(self, part: Part, start: int, target: Tensor) -> None:
        place, done = self._places[part.key][0] + start, 0
        while done < target.numel():
            first = (place + done) // ALIGNMENT * ALIGNMENT
            skipped = place + done - first
            count = min(target.numel() - done, self._chunk_bytes - skipped)
            buffer = self._buffer(0, _Window(first, first + skipped + count))
            self._file.read(buffer, first)
            target[done : done + count].copy_(buffer[skipped : skipped + count])
            done += count

    def forget(self, parts: Sequence[Part]) -> None:
        """Keeps the space: the next sleep writes there again."""

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()
        self._buffers.clear()

    def _place(self, parts: Sequence[Part]) -> None:
        """A group lies together, from an aligned offset on."""
        for part in parts:
            if self._places.get(part.key, (0, -1))[1] != part.num_bytes:
                self._places[part.key] = (self._end, part.num_bytes)
                self._end += -(-part.num_bytes // _PLACE_ALIGNMENT) * _PLACE_ALIGNMENT
        self._end = align_up(self._end)

    def _windows(self, parts: Sequence[Part]) -> Iterator[_Window]:
        """At most ``chunk_bytes`` each, in blocks of the disk that no other window touches. Groups
        are saved whole, in blocks of their own: nobody owns what lies between parts."""
        window: _Window | None = None
        for part in sorted(parts, key=lambda one: self._places[one.key]):
            place, done = self._places[part.key][0], 0
            while done < part.num_bytes:
                position = place + done
                if window is None or not (
                    position < window.start + self._chunk_bytes
                    and position - window.end < ALIGNMENT
                ):
                    if window is not None:
                        yield window
                    first = position // ALIGNMENT * ALIGNMENT
                    window = _Window(first, first)
                count = min(part.num_bytes - done, window.start + self._chunk_bytes - position)
                window.pieces.append((part, done, position - window.start, count))
                window.end = position + count
                done += count
        if window is not None:
            yield window

    def _read_ahead(self, windows: Sequence[_Window], number: int) -> Future[None] | None:
        if number == len(windows):
            return None
        buffer = self._buffer(number % 2, windows[number])
        return self._thread.submit(self._file.read, buffer, windows[number].start)

    def _buffer(self, slot: int, window: _Window) -> Tensor:
        """One of the two, as long as the window."""
        if not self._buffers:
            size = min(self._chunk_bytes, max(self._end, ALIGNMENT))
            self._buffers = [host_memory.allocate(size) for _ in range(2)]
        length = align_up(window.end - window.start)
        if length > self._buffers[slot].numel():
            self._buffers[slot] = host_memory.allocate(min(self._chunk_bytes, self._end))
        return self._buffers[slot][:length]


def _give_back_host_memory() -> None:
    # PyTorch keeps what the device may still read from.
    device.synchronize()
    device.empty_host_cache()


def _finish(pending: Future[None] | None) -> None:
    if pending is not None:
        pending.result()
