"""Streamed optimizer state on an accelerator, and what host and device hold over many sleeps."""

from pathlib import Path

import pytest
import torch

from miles.backends.megatron_utils.host_adam import HostAdam, HostOptions
from miles.backends.training_utils.direct_file import DirectFile
from miles.backends.training_utils.offload_backing import Backing, DiskBacking, HostBacking
from miles.backends.training_utils.offload_store import OffloadStore
from miles.core import device, host_memory
from tests.unit.backends.training_utils.test_streamed_optimizer import check_twenty_steps

pytestmark = pytest.mark.gpu
CHUNK = 16 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_streamed_steps_are_those_of_adamw_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    check_twenty_steps(tmp_path, dtype, device.device_type())


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_cycles_restore_every_bit_and_hold_no_more_memory_each_time(
    tmp_path: Path, target: str
) -> None:
    where = device.current_device()
    tensors = {str(n): torch.rand(11 << 20, device=where) for n in range(5)}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    backing: Backing = HostBacking() if target == "cpu" else DiskBacking(str(tmp_path), CHUNK)
    store = OffloadStore(backing, weights=lambda: tensors)
    before = device.memory_stats().allocated_bytes
    resident: list[int] = []
    for _ in range(4):
        store.sleep()
        assert device.memory_stats().allocated_bytes <= before - 5 * (44 << 20)
        read = store.read("3", tensors["3"])
        assert torch.equal(read.cpu(), expected["3"])
        del read
        store.wake_up()
        assert device.memory_stats().allocated_bytes == before
        resident.append(_resident_bytes())
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu(), expected[name])
    assert resident[3] - resident[1] < 8 << 20
    store.close()


def test_what_slept_together_comes_back_in_one_allocation() -> None:
    where = device.current_device()
    sizes = [(3 << 20) + 512 * n for n in range(40)] + [1 << 10, 25 << 20]
    tensors = {str(n): torch.rand(size, device=where) for n, size in enumerate(sizes)}
    store = OffloadStore(HostBacking(), weights=lambda: tensors)
    store.sleep()
    before = torch.accelerator.memory_stats()["segment.large_pool.allocated"]
    store.wake_up()
    assert torch.accelerator.memory_stats()["segment.large_pool.allocated"] == before + 1
    reserved = device.memory_stats().reserved_bytes
    store.sleep()
    assert device.memory_stats().reserved_bytes <= reserved - 4 * sum(sizes)
    store.close()


def test_what_others_allocate_awake_keeps_no_segment_of_a_sleeping_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = device.current_device()
    # 512 KiB above a multiple of the 2 MiB that segments come in: 1.5 MiB are left at the end.
    sizes = [100 << 20] * 3 + [(100 << 20) + (512 << 10)]
    tensors = {str(n): torch.rand(size // 4, device=where) for n, size in enumerate(sizes)}
    store = OffloadStore(HostBacking(), weights=lambda: tensors)
    store.sleep()
    before = device.memory_stats().reserved_bytes
    store.wake_up()
    kept = [torch.empty(size, dtype=torch.uint8, device=where) for size in (1_258_000, 600_000)]
    store.sleep()
    assert device.memory_stats().reserved_bytes - before < 64 << 20
    assert "sleeping trainer keeps" not in caplog.text
    store.wake_up()
    kept.append(torch.empty(200 << 20, dtype=torch.uint8, device=where))
    store.sleep()
    assert "sleeping trainer keeps" in caplog.text
    store.close()


def test_pinned_memory_is_exact_and_serves_files_and_the_device(tmp_path: Path) -> None:
    size = 5 * 4096 * 300
    before = device.pinned_bytes()
    memory = host_memory.allocate(size)
    assert memory.is_pinned()
    assert device.pinned_bytes() == before + size
    there = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device.current_device())
    memory.copy_(there, non_blocking=True)
    device.synchronize()
    file = DirectFile(str(tmp_path))
    file.reserve(size)
    file.write(memory, 0)
    memory.zero_()
    file.read(memory, 0)
    file.close()
    back = torch.empty_like(there)
    back.copy_(memory, non_blocking=True)
    assert torch.equal(back, there)
    del memory
    # Less than a page: PyTorch's own, for the answer of a comparison.
    assert device.pinned_bytes() - before < 4096


def test_main_parameters_in_host_memory_take_as_much_of_it_as_they_have() -> None:
    where = device.current_device()
    params = [torch.nn.Parameter(torch.rand(n, device=where)) for n in (9 << 20, 5 << 20)]
    options = HostOptions(fraction=1.0, overlap=True, pin_gradients=False, pin_main=True)
    before = device.pinned_bytes()
    adam = HostAdam(params, host=options, master_weights=True)
    for param in params:
        adam.initialize_state(param)
    assert device.pinned_bytes() - before == 4 * (14 << 20)


def test_what_an_update_leaves_behind_goes_back_only_from_a_sleeping_trainer() -> None:
    where = device.current_device()
    tensors = {"w": torch.rand(1 << 20, device=where)}
    store = OffloadStore(HostBacking(), weights=lambda: tensors)
    device.empty_cache()
    before = device.memory_stats().reserved_bytes

    def reserved_after_an_update() -> int:
        torch.empty(256 << 20, dtype=torch.uint8, device=where)
        store.give_back()
        return device.memory_stats().reserved_bytes - before

    assert reserved_after_an_update() >= 256 << 20
    store.sleep()
    assert reserved_after_an_update() <= 0
    store.close()


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
