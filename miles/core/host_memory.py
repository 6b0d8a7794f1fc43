"""Host memory of whole pages, as large as asked for, that the device's copies can use.

PyTorch's own pinned memory comes in powers of two, and at addresses that direct I/O need not take.
"""

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from miles.core import device


def allocate(num_bytes: int) -> Tensor:
    """uint8 ``[num_bytes]`` zeros from the first byte of a page on. The memory goes back to the
    system with the last tensor of it. Raises ``RuntimeError`` where it cannot be pinned."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Torch holds this object, which holds the pages: it is the first of the two to go.
    owner = (ctypes.c_ubyte * num_bytes).from_buffer(pages)
    memory = torch.frombuffer(owner, dtype=torch.uint8)
    address = memory.data_ptr()
    if device.pin(address, num_bytes):
        # The driver gives up everything at the end of the process by itself.
        weakref.finalize(owner, device.unpin, address).atexit = False
    return memory
