"""Memory of whole pages; what pinning does for copies is seen on accelerators (tests/gpu)."""

from pathlib import Path

import pytest
import torch

from miles.core import device, host_memory


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 5_000_001])
def test_memory_is_as_large_as_asked_for_and_begins_with_a_page(num_bytes: int) -> None:
    memory = host_memory.allocate(num_bytes)
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum()) == 7 * num_bytes


def test_memory_is_unpinned_after_its_last_tensor_and_before_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the driver still knows must not be mapped again for something else."""
    pinned: list[tuple[int, int]] = []
    unpinned: list[tuple[int, bool]] = []

    def pin(address: int, num_bytes: int) -> bool:
        pinned.append((address, num_bytes))
        return True

    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "unpin", lambda a: unpinned.append((a, is_mapped(a))))
    memory = host_memory.allocate(10_000)
    address = memory.data_ptr()
    assert pinned == [(address, 10_000)]
    part = memory[4096:4104].view(torch.float32)
    del memory
    assert unpinned == []
    del part
    assert unpinned == [(address, True)]
