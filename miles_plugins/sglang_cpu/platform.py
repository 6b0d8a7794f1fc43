"""SGLang's platform of plain PyTorch on a CPU: no ``sgl_kernel``, no other compiled kernels."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


# SGLang's two bases differ in ``get_device``; platforms of its own join them like this.
class TorchCpuPlatform(  # pyright: ignore[reportIncompatibleMethodOverride]
    CpuDeviceMixin, SRTPlatform
):
    """Out of tree, so that SGLang asks it for every class that depends on the device."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Operators run their ``forward_native``."""
        return "native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def init_backend(self) -> None:
        """Called once in each scheduler. SGLang's weight checker waits for CUDA whatever the
        device, which raises where torch has no CUDA to wait for."""
        torch.cuda.synchronize = torch.cpu.synchronize
