"""Sleep and wake: device storages are copied elsewhere and freed, later restored bit for bit."""

from collections.abc import Callable, Mapping
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
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        updated = self._asleep
        if not self._asleep:
            weights = _storages(self._weights())
            others = _storages(self._others(), beside=weights)
            self._save_and_free(others)
            self._free(_storages(self._scratch(), beside=weights | others))
            self._asleep = True
        if not (keep_weights or self._weights_gone):
            self._leave_weights(updated=updated)
            self._weights_gone = True
        device.empty_cache()

    def wake_up(self) -> None:
        """Undo ``sleep``. Idempotent; collective where weights are to be rebuilt."""
        for parts in (*self._saved, *self._zeroed):
            device.allocate_together([part.num_bytes for part in parts])
            for part in parts:
                part.storage.resize_(part.num_bytes)
        self._backing.load(list(chain.from_iterable(self._saved)))
        for part in chain.from_iterable(self._zeroed):
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

    def close(self) -> None:
        """Give host memory and disk space back."""
        self._backing.close()

    def _leave_weights(self, *, updated: bool) -> None:
        """``updated``: engines have them already."""
        weights = _storages(self._weights())
        derived = _storages(self._derived()) if updated else {}
        locals_by_name = {name: local_tensor(tensor) for name, tensor in self._weights().items()}
        entries: dict[str, _Entry] = {}
        for name, local in locals_by_name.items():
            address = local.untyped_storage().data_ptr()
            if address in weights:
                entries[name] = _Entry(local, weights[address], address not in derived)
        kept = {k: part for k, part in weights.items() if k not in derived}
        # Apart from the rest: the memory of a copy that is not made again can be given back then.
        rebuildable = _storages(self._derived()).keys()
        self._save_and_free({k: part for k, part in kept.items() if k not in rebuildable})
        self._save_and_free({k: part for k, part in kept.items() if k in rebuildable})
        self._backing.forget(list(derived.values()))
        self._free(derived)
        self._entries, self._must_rebuild = entries, bool(derived)

    def _save_and_free(self, parts: Mapping[int, Part]) -> None:
        """At once, and only when all of them are safe."""
        leaving = list(parts.values())
        self._backing.save(leaving)
        self._saved.append(leaving)
        for part in leaving:
            part.storage.resize_(0)

    def _free(self, parts: Mapping[int, Part]) -> None:
        device.synchronize()
        self._zeroed.append(list(parts.values()))
        for part in parts.values():
            part.storage.resize_(0)


def _storages(
    tensors: Mapping[str, Tensor], *, beside: Mapping[int, Part] | None = None
) -> dict[int, Part]:
    """The storages behind tensors by their addresses, less empty ones and those of ``beside``. A
    storage is called by the first of its names."""
    parts: dict[int, Part] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() > 0 and address not in parts and address not in (beside or {}):
            parts[address] = Part(name, storage, storage.nbytes(), local.device)
    return parts
