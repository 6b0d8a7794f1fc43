"""Sleep and wake: device storages copied to host memory and freed, later restored bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.core import device


@dataclass
class _Entry:
    storage: torch.UntypedStorage
    host: Tensor
    """uint8, the whole storage."""
    local: Tensor
    """What it holds; metadata only while the storage is empty."""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage with ``tensor``."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HostStore:
    """Where the trainer's state lies while it sleeps.

    ``state`` names every tensor that must survive. Tensors keep their identity: only the storage
    behind them is emptied, so that FSDP's and the optimizer's references stay good. With an
    accelerator, host buffers are pinned and kept: pinning costs half a second a GiB.
    """

    def __init__(self, state: Callable[[], Mapping[str, Tensor]]) -> None:
        self._state = state
        self._entries: dict[str, _Entry] = {}
        self._buffers: dict[str, Tensor] = {}

    @property
    def asleep(self) -> bool:
        return bool(self._entries)

    def sleep(self) -> None:
        """Copy and free. Idempotent. Memory goes back to the device, not to PyTorch's cache."""
        if self.asleep:
            return
        by_address: dict[int, Tensor] = {}
        entries: dict[str, _Entry] = {}
        for name, tensor in self._state().items():
            local = local_tensor(tensor)
            storage = local.untyped_storage()
            if storage.nbytes() == 0:
                continue
            host = by_address.get(storage.data_ptr())
            if host is None:
                host = self._host_buffer(name, storage.nbytes())
                host.copy_(_bytes(storage, local.device), non_blocking=True)
                by_address[storage.data_ptr()] = host
            entries[name] = _Entry(storage, host, local)
        device.synchronize()
        for entry in entries.values():
            entry.storage.resize_(0)
        self._entries = entries
        device.empty_cache()

    def wake_up(self) -> None:
        """Undo ``sleep``. Idempotent."""
        for entry in self._entries.values():
            entry.storage.resize_(entry.host.numel())
            _bytes(entry.storage, entry.local.device).copy_(entry.host, non_blocking=True)
        device.synchronize()
        self._entries = {}

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's shard of ``tensor`` on the device, whether awake or asleep."""
        entry = self._entries.get(name)
        if entry is None:
            return local_tensor(tensor)
        local = entry.local
        start = local.storage_offset() * local.element_size()
        held = entry.host[start : start + local.numel() * local.element_size()]
        assert local.is_contiguous(), f"{name}: a shard is a slice of dimension 0"
        return held.view(local.dtype).view(local.shape).to(local.device)

    def _host_buffer(self, name: str, num_bytes: int) -> Tensor:
        if not device.has_accelerator():
            return torch.empty(num_bytes, dtype=torch.uint8)
        if name not in self._buffers or self._buffers[name].numel() != num_bytes:
            self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[name]


def _bytes(storage: torch.UntypedStorage, where: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)
