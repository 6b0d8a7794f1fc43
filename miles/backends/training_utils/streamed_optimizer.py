"""Adam whose state lies in files: the step brings it in one bucket at a time.

While one bucket is updated on the device, the next is read and the one before is written. The
state of all shards is one flat space of elements, in one file for each kind (masters, moments); a
bucket is a range of it, so that none is larger than the chunk, however large a parameter is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils import adam
from miles.backends.training_utils.direct_file import ALIGNMENT, DirectFile
from miles.config.offload import OffloadConfig
from miles.core import device, host_memory

MASTER, MEAN, SQUARE = "master", "exp_avg", "exp_avg_sq"
_SHARD_ALIGNMENT = 64
"""Elements. Pieces of a shard begin at multiples of it, as vectorized kernels begin theirs, so that
every element is computed as in one piece."""
_STAGES = 3
"""Host buffers: one is read, one is on its way to or from the device, one is written."""


@dataclass(frozen=True)
class Piece:
    """A range of one shard that is on the device for the moment."""

    shard: int
    start: int
    stop: int
    values: Mapping[str, Tensor]
    """``[stop - start]`` by kind, in the kind's dtype; what is written here is kept."""


@dataclass(frozen=True)
class _Range:
    """A bucket: elements of the flat space."""

    start: int
    stop: int
    shards: tuple[tuple[int, int, int], ...]
    """Shard, first and last element within it."""


class StreamedState:
    """Tensors of each kind for each shard, all zeros at first."""

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        directory: str,
        chunk_bytes: int,
    ) -> None:
        """``numels``: elements of each shard; ``dtypes``: of each kind. Raises ``OffloadError``."""
        self._numels, self._dtypes = list(numels), dict(dtypes)
        self._starts, self._size = _layout(numels)
        per_element = sum(dtype.itemsize for dtype in dtypes.values())
        self._stride = max(ALIGNMENT, chunk_bytes // per_element // ALIGNMENT * ALIGNMENT)
        self._files = {kind: DirectFile(directory) for kind in dtypes}
        self._mapped: dict[str, Tensor] = {}
        for kind, dtype in dtypes.items():
            if self._size:
                self._files[kind].reserve(self._size * dtype.itemsize)
                self._mapped[kind] = self._files[kind].mapped().view(dtype)
        self._ranges = list(self._split())
        self._stages: list[Tensor] = []
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="optimizer-state")

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return self._size * sum(dtype.itemsize for dtype in self._dtypes.values())

    @property
    def bucket_bytes(self) -> int:
        """The most that is on the device at once."""
        longest = max((r.stop - r.start for r in self._ranges), default=0)
        return longest * sum(dtype.itemsize for dtype in self._dtypes.values())

    def tensor(self, kind: str, shard: int) -> Tensor:
        """``[numel]`` in host memory, sharing it with the file; not to be used while ``stream``
        runs. What is written there is in the next step."""
        start, numel = self._starts[shard], self._numels[shard]
        if numel == 0:
            return torch.empty(0, dtype=self._dtypes[kind])
        return self._mapped[kind][start : start + numel]

    def stream(self, where: torch.device, update: Callable[[Sequence[Piece]], None]) -> None:
        """Let ``update`` change every piece on the device, bucket by bucket.

        Raises ``OffloadError``; buckets before the failed one are changed then, so that the state
        is of no use any more.
        """
        if not self._ranges:
            return
        self._allocate()
        writes: list[Future[None] | None] = [None] * _STAGES
        ahead = self._read_ahead(0)
        try:
            for number, bucket in enumerate(self._ranges):
                stage, following = number % _STAGES, (number + 1) % _STAGES
                ahead.result()
                if number + 1 < len(self._ranges):
                    _finish(writes[following])
                    ahead = self._read_ahead(number + 1)
                staged = self._staged(bucket, stage)
                on_device = staged.to(where, non_blocking=True)
                update(self._pieces(bucket, on_device))
                if on_device.device != staged.device:
                    staged.copy_(on_device, non_blocking=True)
                device.synchronize()
                writes[stage] = self._threads.submit(self._write, bucket, staged)
        finally:
            wait([ahead, *(one for one in writes if one is not None)])
        for one in writes:
            _finish(one)

    def zero(self, kind: str) -> None:
        """Make all of a kind zeros: past the page cache, as ``stream`` writes. Raises
        ``OffloadError``."""
        if not self._ranges:
            return
        self._allocate()
        zeros, size = self._stages[0].zero_(), self._dtypes[kind].itemsize
        for bucket in self._ranges:
            length = (bucket.stop - bucket.start) * size
            self._files[kind].write(zeros[:length], bucket.start * size)

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        self._threads.shutdown()
        self._mapped.clear()
        self._stages.clear()
        for file in self._files.values():
            file.close()

    def _split(self) -> Iterator[_Range]:
        position = 0
        for start in range(0, self._size, self._stride):
            stop = min(start + self._stride, self._size)
            shards: list[tuple[int, int, int]] = []
            while position < len(self._numels):
                first, numel = self._starts[position], self._numels[position]
                begin, end = max(start, first), min(stop, first + numel)
                if begin < end:
                    shards.append((position, begin - first, end - first))
                if first + numel > stop:
                    break
                position += 1
            yield _Range(start, stop, tuple(shards))

    def _allocate(self) -> None:
        if not self._stages:
            number = min(_STAGES, len(self._ranges) + 1)
            self._stages = [host_memory.allocate(self.bucket_bytes) for _ in range(number)]

    def _staged(self, bucket: _Range, stage: int) -> Tensor:
        per_element = sum(dtype.itemsize for dtype in self._dtypes.values())
        return self._stages[stage][: (bucket.stop - bucket.start) * per_element]

    def _read_ahead(self, number: int) -> Future[None]:
        bucket = self._ranges[number]
        return self._threads.submit(self._read, bucket, self._staged(bucket, number % _STAGES))

    def _segments(self, bucket: _Range, staged: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Kind, its bytes in a staged bucket, and where they are in its file."""
        at = 0
        for kind, dtype in self._dtypes.items():
            length = (bucket.stop - bucket.start) * dtype.itemsize
            yield kind, staged[at : at + length], bucket.start * dtype.itemsize
            at += length

    def _read(self, bucket: _Range, staged: Tensor) -> None:
        for kind, segment, offset in self._segments(bucket, staged):
            self._files[kind].read(segment, offset)

    def _write(self, bucket: _Range, staged: Tensor) -> None:
        for kind, segment, offset in self._segments(bucket, staged):
            self._files[kind].write(segment, offset)

    def _pieces(self, bucket: _Range, on_device: Tensor) -> list[Piece]:
        by_kind = {
            kind: segment.view(self._dtypes[kind])
            for kind, segment, _ in self._segments(bucket, on_device)
        }
        pieces: list[Piece] = []
        for shard, start, stop in bucket.shards:
            at = self._starts[shard] + start - bucket.start
            values = {kind: flat[at : at + stop - start] for kind, flat in by_kind.items()}
            pieces.append(Piece(shard, start, stop, values))
        return pieces


@dataclass(frozen=True)
class AdamShard:
    """One parameter's shard, as Adam sees it."""

    numel: int
    gradient: Callable[[], Tensor | None]
    """Of this step, ``[numel]`` in any shape, fp32; ``None``: the shard stays as it is."""
    settings: Mapping[str, Any]
    """The parameter group: lr, betas, eps, weight_decay."""
    num_steps: Callable[[], int]
    """Updates of this shard so far, this step included."""
    parameter: Tensor
    """On the device: fp32, and updated itself; or narrower, and a copy of the streamed master."""


class StreamedAdam:
    """Adam (Kingma and Ba, arXiv:1412.6980), decoupled weight decay (Loshchilov and Hutter,
    arXiv:1711.05101) with ``decoupled``, on PyTorch's kernels.

    With fp32 moments the result is bit for bit that of the same kernels on resident state; bf16
    moments are widened for the update and rounded after it. Masters are streamed for shards whose
    parameter is narrower than fp32.
    """

    def __init__(
        self, shards: Sequence[AdamShard], config: OffloadConfig, *, decoupled: bool = True
    ) -> None:
        """Raises ``OffloadError``."""
        assert config.offload_train_disk_dir is not None, "resolved"
        kinds = streamed_moments(config)
        self._shards, self._decoupled = list(shards), decoupled
        self._members: list[list[int]] = [[], []]
        self._place: list[tuple[int, int]] = []
        for number, shard in enumerate(shards):
            mastered = int(shard.parameter.dtype != torch.float32)
            self._place.append((mastered, len(self._members[mastered])))
            self._members[mastered].append(number)
        self.states = [
            StreamedState(
                [shards[number].numel for number in members],
                kinds if not mastered else {MASTER: torch.float32, **kinds},
                config.offload_train_disk_dir,
                config.offload_train_disk_chunk_mb << 20,
            )
            for mastered, members in enumerate(self._members)
        ]

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The state of a shard by kind, ``[numel]`` in host memory, sharing it with the files."""
        mastered, member = self._place[number]
        kinds = (MASTER, MEAN, SQUARE) if mastered else (MEAN, SQUARE)
        return {kind: self.states[mastered].tensor(kind, member) for kind in kinds}

    @torch.no_grad()
    def step(self) -> None:
        """One update of every shard that has a gradient. Raises ``OffloadError``."""
        for members, state in zip(self._members, self.states, strict=True):
            if members:
                where = self._shards[members[0]].parameter.device
                state.stream(where, lambda pieces, members=members: self._update(members, pieces))

    def zero_moments(self) -> None:
        """Forget the past; masters stay. Raises ``OffloadError``."""
        for state in self.states:
            for kind in (MEAN, SQUARE):
                state.zero(kind)

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        for state in self.states:
            state.close()

    def _update(self, members: Sequence[int], pieces: Sequence[Piece]) -> None:
        """Pieces of one group that took as many steps go through the kernel together."""
        together: dict[tuple[int, int], list[tuple[AdamShard, Piece, Tensor]]] = {}
        for piece in pieces:
            shard = self._shards[members[piece.shard]]
            gradient = shard.gradient()
            if gradient is not None:
                part = gradient.reshape(-1)[piece.start : piece.stop]
                key = (id(shard.settings), shard.num_steps())
                together.setdefault(key, []).append((shard, piece, part))
        for (_, num_steps), entries in together.items():
            self._update_together(entries, num_steps)

    def _update_together(
        self, entries: Sequence[tuple[AdamShard, Piece, Tensor]], num_steps: int
    ) -> None:
        settings = entries[0][0].settings
        resident = [shard.parameter.view(-1)[p.start : p.stop] for shard, p, _ in entries]
        masters = [
            piece.values.get(MASTER, own)
            for own, (_, piece, _) in zip(resident, entries, strict=True)
        ]
        means, squares = (
            [piece.values[kind].float() for _, piece, _ in entries] for kind in (MEAN, SQUARE)
        )
        adam.update(
            masters,
            [gradient for _, _, gradient in entries],
            (means, squares),
            settings,
            num_steps=num_steps,
            decoupled=self._decoupled,
        )
        for index, (_, piece, _) in enumerate(entries):
            for kind, wide in ((MEAN, means[index]), (SQUARE, squares[index])):
                if piece.values[kind].dtype != wide.dtype:
                    piece.values[kind].copy_(wide)
            if MASTER in piece.values:
                resident[index].copy_(masters[index])


def streamed_moments(config: OffloadConfig) -> dict[str, torch.dtype]:
    """Their dtypes on disk."""
    narrow = config.stream_optimizer_state_moment_dtype == "bf16"
    return dict.fromkeys((MEAN, SQUARE), torch.bfloat16 if narrow else torch.float32)


def _layout(numels: Sequence[int]) -> tuple[list[int], int]:
    """Where each shard begins, and the size of the whole, in elements."""
    starts: list[int] = []
    end = 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // _SHARD_ALIGNMENT) * _SHARD_ALIGNMENT
    return starts, -(-end // ALIGNMENT) * ALIGNMENT


def _finish(pending: Future[None] | None) -> None:
    if pending is not None:
        pending.result()
