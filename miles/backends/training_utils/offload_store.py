"""Sleep and wake: device storages copied to host memory and freed, later restored bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.core import device


@dataclass
class _Held:
    """One storage that is freed; views of it may have many names."""

    storage: torch.UntypedStorage
    num_bytes: int
    where: torch.device
    host: Tensor | None
    """uint8, the whole storage; ``None`` when it comes back zeroed."""


@dataclass
class _Entry:
    """One name of the state."""

    local: Tensor
    """Metadata only while its storage is empty."""
    held: _Held


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage with ``tensor``."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nothing() -> Mapping[str, Tensor]:
    return {}


class HostStore:
    """Where the trainer's state lies while it sleeps.

    ``state`` names every tensor that must survive, ``scratch`` those whose storage is freed too but
    comes back as zeros (gradient buffers). Several tensors may be views of one storage: it is
    copied once, whole. Tensors keep their identity: only the storage behind them is emptied, so
    that the references of FSDP, DDP and the optimizer stay good. With an accelerator, host buffers
    are pinned and kept: pinning costs half a second a GiB.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Tensor]],
        scratch: Callable[[], Mapping[str, Tensor]] = _nothing,
    ) -> None:
        self._state = state
        self._scratch = scratch
        self._asleep = False
        self._entries: dict[str, _Entry] = {}
        self._held: list[_Held] = []
        self._buffers: dict[str, Tensor] = {}

    @property
    def asleep(self) -> bool:
        return self._asleep

    def sleep(self) -> None:
        """Copy and free. Idempotent. Memory goes back to the device, not to PyTorch's cache."""
        if self._asleep:
            return
        by_address: dict[int, _Held] = {}
        entries: dict[str, _Entry] = {}
        for name, tensor in self._state().items():
            local = local_tensor(tensor)
            storage = local.untyped_storage()
            if storage.nbytes() == 0:
                continue
            held = by_address.get(storage.data_ptr())
            if held is None:
                host = self._host_buffer(name, storage.nbytes())
                host.copy_(_bytes(storage, local.device), non_blocking=True)
                held = _Held(storage, storage.nbytes(), local.device, host)
                by_address[storage.data_ptr()] = held
            entries[name] = _Entry(local, held)
        for tensor in self._scratch().values():
            local = local_tensor(tensor)
            storage = local.untyped_storage()
            # Of what also belongs to the state, the content survives.
            if storage.nbytes() > 0 and storage.data_ptr() not in by_address:
                held = _Held(storage, storage.nbytes(), local.device, None)
                by_address[storage.data_ptr()] = held
        device.synchronize()
        self._asleep, self._entries, self._held = True, entries, list(by_address.values())
        for held in self._held:
            held.storage.resize_(0)
        device.empty_cache()

    def wake_up(self) -> None:
        """Undo ``sleep``. Idempotent."""
        for held in self._held:
            held.storage.resize_(held.num_bytes)
            restored = _bytes(held.storage, held.where)
            if held.host is None:
                restored.zero_()
            else:
                restored.copy_(held.host, non_blocking=True)
        device.synchronize()
        self._asleep, self._entries, self._held = False, {}, []

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's shard of ``tensor`` on the device, whether awake or asleep."""
        entry = self._entries.get(name)
        if entry is None:
            return local_tensor(tensor)
        local, host = entry.local, entry.held.host
        assert host is not None, f"{name}: part of the state"
        assert local.is_contiguous(), f"{name}: a shard is a slice of dimension 0"
        start = local.storage_offset() * local.element_size()
        saved = host[start : start + local.numel() * local.element_size()]
        # The host buffer stays as it is until the device, in its order, comes to the next sleep.
        return saved.view(local.dtype).view(local.shape).to(local.device, non_blocking=True)

    def _host_buffer(self, name: str, num_bytes: int) -> Tensor:
        if not device.has_accelerator():
            return torch.empty(num_bytes, dtype=torch.uint8)
        if name not in self._buffers or self._buffers[name].numel() != num_bytes:
            self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[name]


def _bytes(storage: torch.UntypedStorage, where: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)
