"""Sleep and wake: device storages are copied elsewhere and freed, later restored bit for bit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.backends.training_utils.offload_backing import Backing, DiskBacking, HostBacking, Part
from miles.config.offload import OffloadConfig
from miles.core import device, logging, places

log = logging.get(__name__)

Named = Callable[[], Mapping[str, Tensor]]

_GIB = 2**30
_BATCH_BYTES = 4 * _GIB
"""Allocated at once when a trainer wakes."""
_MAY_STAY = 0.05
"""Of the device memory that a trainer had, while it sleeps."""
_MAY_STAY_BYTES = 64 << 20
"""Whatever the share: tensors of other owners, in PyTorch's segments of 20 MiB."""


@dataclass(frozen=True)
class _Entry:
    """One name of the weights while its storage is freed."""

    local: Tensor
    """Metadata only."""
    part: Part
    saved: bool
    """Otherwise it is made anew when the trainer wakes."""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage with ``tensor``."""
    if isinstance(tensor, DTensor):
        # Detaching a DTensor goes through its dispatcher: ten times as long, for every tensor.
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.detach()


def make_backing(config: OffloadConfig) -> Backing:
    """Where ``--offload-train-target`` says. Raises ``OffloadError``."""
    if config.offload_train_target == "cpu":
        return HostBacking()
    directory = config.offload_train_disk_dir
    assert directory is not None, "resolved"
    if places.lies_in_memory(directory):
        log.warning(
            "--offload-train-disk-dir %s lies in host memory (tmpfs): nothing is spared", directory
        )
    return DiskBacking(directory, config.offload_train_disk_chunk_mb << 20)


def _nothing() -> Mapping[str, Tensor]:
    return {}


class OffloadStore:
    """Frees the device memory of a trainer's state, and brings it back.

    ``weights`` are the policy's, which can stay for a weight update or be read one by one while
    they are gone; ``others`` is all else that must survive; ``scratch`` comes back as zeros
    (gradient buffers). Several tensors may be views of one storage: it moves once, whole. Tensors
    keep their identity: only the storage behind them is emptied, so that the references of FSDP,
    DDP and the optimizer stay good.

    ``derived`` names those of the weights that ``rebuild`` makes from the rest. They are not kept
    while the trainer sleeps if a weight update has had them before (``sleep(keep_weights=True)``,
    then ``sleep()``); otherwise the engines' next weights have to come from a copy.
    """

    def __init__(
        self,
        backing: Backing,
        *,
        weights: Named,
        others: Named = _nothing,
        scratch: Named = _nothing,
        derived: Named = _nothing,
        rebuild: Callable[[], None] = lambda: None,
    ) -> None:
        self._backing = backing
        self._weights, self._others, self._scratch = weights, others, scratch
        self._derived, self._rebuild = derived, rebuild
        self._asleep = self._weights_gone = self._must_rebuild = False
        self._reserved_awake = 0
        self._entries: dict[str, _Entry] = {}
        self._saved: list[list[Part]] = []
        """Those that left together; likewise the next."""
        self._zeroed: list[list[Part]] = []

    @property
    def asleep(self) -> bool:
        return self._asleep

    def tensors(self) -> dict[str, Tensor]:
        """All that survives a sleep, by name; the live tensors."""
        return {**self._others(), **self._weights()}

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Save and free; memory goes back to the device, not to PyTorch's cache. Idempotent.

        ``keep_weights`` leaves the policy's weights where they are; another call without it frees
        them too. Raises ``OffloadError`` and leaves what it was about to free as it was.
        """
        if not self._asleep:
            self._reserved_awake = device.memory_stats().reserved_bytes
        frees_weights = not (keep_weights or self._weights_gone)
        if frees_weights or not self._asleep:
            self._leave(with_weights=frees_weights)
        device.empty_cache()
        if frees_weights:
            self._tell_what_stays()

    def wake_up(self) -> None:
        """Undo ``sleep``. Idempotent; collective where weights are to be rebuilt."""
        # The driver clears what it gives, on the engine that copies: a ninth of a copy's time.
        for parts in chain.from_iterable(map(_batches, self._saved)):
            _allocate(parts)
            self._backing.load(parts)
        for parts in self._zeroed:
            _allocate(parts)
            for part in parts:
                part.device_bytes().zero_()
        device.synchronize()
        self._asleep = self._weights_gone = False
        self._entries, self._saved, self._zeroed = {}, [], []
        if self._must_rebuild:
            self._must_rebuild = False
            self._rebuild()

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's shard of one of the weights, on the device, whether awake or asleep."""
        entry = self._entries.get(name)
        if entry is None:
            return local_tensor(tensor)
        local = entry.local
        assert entry.saved, f"{name}: made anew when the trainer wakes"
        assert local.is_contiguous(), f"{name}: a shard is a slice of dimension 0"
        shard = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        start = int(local.storage_offset()) * local.element_size()
        self._backing.read(entry.part, start, shard.view(-1).view(torch.uint8))
        return shard

    def give_back(self) -> None:
        """Asleep: what a weight update has left in PyTorch's cache goes back to the device. Awake,
        the next step uses it."""
        if self._asleep:
            device.empty_cache()

    def close(self) -> None:
        """Give host memory and disk space back."""
        self._backing.close()

    def _leave(self, *, with_weights: bool) -> None:
        """Free what is there still, at once, and only when all that is kept is safe."""
        named = _locals(self._weights())
        weights = _storages(named)
        saved: list[list[Part]] = []
        freed: list[Part] = []
        if not self._asleep:
            others = _storages(_locals(self._others()), beside=weights)
            scratch = _storages(_locals(self._scratch()), beside=weights | others)
            saved.append(list(others.values()))
            freed += scratch.values()
        entries: dict[str, _Entry] = {}
        dropped: list[Part] = []
        if with_weights:
            rebuildable = _storages(_locals(self._derived())).keys()
            plain = [part for address, part in weights.items() if address not in rebuildable]
            derived = [part for address, part in weights.items() if address in rebuildable]
            # Engines have had an update between this sleep and the one that kept the weights.
            kept, dropped = ([], derived) if self._asleep else (derived, [])
            # Apart from the rest: the memory of a copy that is not made again is given back then.
            saved += [plain, kept]
            entries = _entries(named, weights, {part.key for part in dropped})
        self._backing.save(saved)
        self._backing.forget(dropped)
        device.synchronize()
        for part in chain(*saved, freed, dropped):
            part.storage.resize_(0)
        self._saved += saved
        self._zeroed += [freed, dropped]
        self._entries, self._must_rebuild = entries, bool(dropped)
        self._asleep, self._weights_gone = True, with_weights

    def _tell_what_stays(self) -> None:
        stats = device.memory_stats()
        if stats.reserved_bytes > max(_MAY_STAY * self._reserved_awake, _MAY_STAY_BYTES):
            log.warning(
                "a sleeping trainer keeps %.2f of %.2f GiB of device memory, which engines lack: "
                "%.2f GiB are tensors that something outside of its state refers to, the rest are "
                "the segments of PyTorch's allocator that they lie in",
                stats.reserved_bytes / _GIB,
                self._reserved_awake / _GIB,
                stats.allocated_bytes / _GIB,
            )


def _batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts that left together, a few GiB at a time."""
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        batch.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _allocate(parts: Sequence[Part]) -> None:
    with device.allocated_together([part.num_bytes for part in parts]):
        for part in parts:
            part.storage.resize_(part.num_bytes)


def _locals(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_tensor(tensor) for name, tensor in tensors.items()}


def _entries(
    named: Mapping[str, Tensor], weights: Mapping[int, Part], dropped: Collection[str]
) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, local in named.items():
        part = weights.get(local.untyped_storage().data_ptr())
        if part is not None:
            entries[name] = _Entry(local, part, part.key not in dropped)
    return entries


def _storages(
    named: Mapping[str, Tensor], *, beside: Mapping[int, Part] | None = None
) -> dict[int, Part]:
    """The storages behind shards by their addresses, less empty ones and those of ``beside``. A
    storage is called by the first of its names."""
    parts: dict[int, Part] = {}
    for name, local in named.items():
        storage = local.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() > 0 and address not in parts and address not in (beside or {}):
            parts[address] = Part(name, storage, storage.nbytes(), local.device)
    return parts
