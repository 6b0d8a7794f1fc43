"""The only module that names cuda, rocm, npu or cpu, but for their variables
(``device_environment.py``). Everything else asks here.

It adds to ``torch.accelerator`` what PyTorch lacks: collective backend names, pinned memory, and
no-ops on a machine without an accelerator.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

CollectiveBackend = Literal["nccl", "gloo"]
HostBackend = Literal["gloo"]

_POOLED_BYTES = 1 << 20
"""PyTorch's CUDA allocator cuts what is not larger from blocks that it shares among small ones."""
_ALLOCATION_ALIGNMENT = 512

_PINNED_FOR_ALL_DEVICES = 1
"""``cudaHostRegisterPortable``."""
_pinned: dict[int, tuple[int, int]] = {}
"""Bytes, and the device of the process that registered them, by address."""


@dataclass(frozen=True)
class MemoryStats:
    """Bytes on this process's device."""

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


@cache
def has_accelerator() -> bool:
    return torch.accelerator.is_available()


def device_type() -> str:
    """``"cuda"`` (also for ROCm), ``"npu"``, ... or ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
    return accelerator.type if accelerator is not None else "cpu"


def current_device() -> torch.device:
    if not has_accelerator():
        return torch.device("cpu")
    return torch.device(device_type(), torch.accelerator.current_device_index())


def bind(local_rank: int) -> torch.device:
    """Make device ``local_rank`` the current one of this process."""
    if has_accelerator():
        torch.accelerator.set_device_index(local_rank)
    return current_device()


def collective_backend() -> CollectiveBackend:
    return "nccl" if device_type() == "cuda" else "gloo"


def process_group_backend(host: HostBackend = "gloo") -> str:
    """Backend string for ``init_process_group``: device collectives, and ``host`` for tensors in
    host memory."""
    if not has_accelerator():
        return host
    return f"cpu:{host},{device_type()}:{collective_backend()}"


def supports_device_ipc() -> bool:
    """Whether another process on this device can map our tensors."""
    return device_type() == "cuda"


def supports_fused_optimizer() -> bool:
    """Whether PyTorch's fused optimizers have kernels for this device."""
    return device_type() in ("cpu", "cuda")


def synchronize() -> None:
    if has_accelerator():
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give unused memory back to the device, and the workspace that each stream's matrix products
    keep (made anew when next needed)."""
    if device_type() == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    if has_accelerator():
        torch.accelerator.empty_cache()


@contextmanager
def allocated_together(sizes: Sequence[int]) -> Generator[None]:
    """The allocations of so many bytes each that are made here are parts of one, which nothing else
    is part of: when they are gone, all of it can be given back, and at once. The device takes about
    as long to give or take a small piece as a large one."""
    if device_type() != "cuda" or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    own = [size for size in sizes if size > _POOLED_BYTES]
    total = sum(-(-size // _ALLOCATION_ALIGNMENT) * _ALLOCATION_ALIGNMENT for size in own)
    # Within a pool PyTorch does not look for what other pools have cached and could give back.
    empty_cache()
    # Without one, what is left over at the end of the segment would go to whoever asks next, and
    # keep the segment as long as it lives.
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        torch.empty(total, dtype=torch.uint8, device=current_device())
        yield


def empty_host_cache() -> None:
    """Give pinned host memory that is not used any more back to the system."""
    if has_accelerator():
        torch._C._host_emptyCache()  # pyright: ignore[reportPrivateUsage]


def collect_shared() -> None:
    """Free device memory that other processes have mapped and let go."""
    if device_type() == "cuda":
        torch.cuda.ipc_collect()


def memory_stats() -> MemoryStats:
    """Allocator statistics; zeros without an accelerator."""
    if not has_accelerator():
        return MemoryStats(0, 0, 0)
    return MemoryStats(
        torch.accelerator.memory_allocated(),
        torch.accelerator.memory_reserved(),
        torch.accelerator.max_memory_allocated(),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory for what was asked of it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # PyTorch has no type for the host's.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def reset_peak() -> None:
    """Let ``memory_stats().peak_bytes`` be the most from here on."""
    if has_accelerator():
        torch.accelerator.reset_peak_memory_stats()


def pin(address: int, num_bytes: int) -> bool:
    """Let the device's copies use host memory of whole pages, until ``unpin``. Whether that makes a
    difference here. Raises ``RuntimeError`` where the driver refuses."""
    if device_type() != "cuda":
        return False
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, num_bytes, _PINNED_FOR_ALL_DEVICES))
    if code != 0:
        raise RuntimeError(f"cannot pin {num_bytes} bytes of host memory: CUDA error {code}")
    _pinned[address] = (num_bytes, torch.accelerator.current_device_index())
    return True


def unpin(address: int) -> None:
    """Undo ``pin``, once the device has done what it was asked to do."""
    _, index = _pinned.pop(address)
    torch.accelerator.synchronize(index)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def pinned_bytes() -> int:
    """Host memory that the device's copies can use, held by this process."""
    if device_type() != "cuda":
        return 0
    by_torch = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return by_torch + sum(num_bytes for num_bytes, _ in _pinned.values())


def used_bytes() -> int:
    """Of the current device, by whomever; 0 without an accelerator."""
    if not has_accelerator():
        return 0
    free, total = torch.accelerator.get_memory_info()
    return total - free


def capacity_bytes() -> int:
    """Of the current device's whole memory; 0 without an accelerator."""
    return torch.accelerator.get_memory_info()[1] if has_accelerator() else 0


def rng_state() -> dict[str, torch.Tensor]:
    """The random state of this process: host, and device when there is one."""
    state = {"cpu": torch.get_rng_state()}
    if device_type() == "cuda":
        state["device"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "device" in state and device_type() == "cuda":
        torch.cuda.set_rng_state(state["device"])
