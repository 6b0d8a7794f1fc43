"""Sleep and wake, with the state in host memory and on disk."""

import errno
import fcntl
import logging
import os
import resource
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles.backends.training_utils import offload_store
from miles.backends.training_utils.direct_file import OffloadError
from miles.backends.training_utils.offload_backing import Backing, DiskBacking, HostBacking
from miles.backends.training_utils.offload_store import OffloadStore, make_backing
from miles.config.offload import OffloadConfig

CHUNK = 8192


@pytest.fixture(params=["cpu", "disk"])
def backing(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Backing]:
    made = HostBacking(slab_bytes=24) if request.param == "cpu" else disk(tmp_path)
    yield made
    made.close()


def disk(folder: Path) -> DiskBacking:
    return DiskBacking(str(folder), CHUNK)


def storage_bytes(*tensors: Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def always(**tensors: Tensor) -> Callable[[], dict[str, Tensor]]:
    return lambda: tensors


def test_views_of_one_buffer_are_freed_together_and_come_back_whole(backing: Backing) -> None:
    buffer = torch.arange(12, dtype=torch.float32)
    # As DDP lays out its parameters: the buffer itself has bytes that no parameter names.
    first, second = buffer[:4].view(2, 2), buffer[6:10]
    alone = torch.tensor([1.5, -2.5], dtype=torch.bfloat16)
    store = OffloadStore(backing, weights=always(first=first, second=second, alone=alone))
    store.sleep()
    assert store.asleep
    assert storage_bytes(buffer, first, second, alone) == [0, 0, 0, 0]
    assert store.read("first", first).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert store.read("second", second).tolist() == [6.0, 7.0, 8.0, 9.0]
    store.wake_up()
    assert not store.asleep
    assert buffer.tolist() == list(range(12))
    assert alone.tolist() == [1.5, -2.5]
    first[0, 0] = 40.0
    assert buffer[0] == 40.0
    assert store.read("first", first)[0, 0] == 40.0


@pytest.mark.parametrize("batch", [1, 50, 10_000])
def test_a_state_that_comes_back_in_batches_is_as_it_was(
    backing: Backing, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_store, "_BATCH_BYTES", batch)
    tensors = {str(n): torch.arange(n, 2 * n, dtype=torch.float32) for n in range(1, 90, 7)}
    store = OffloadStore(backing, weights=lambda: tensors, others=always(x=torch.ones(3)))
    for _ in range(2):
        store.sleep()
        assert set(storage_bytes(*tensors.values())) == {0}
        store.wake_up()
    assert all(t.tolist() == list(range(int(n), 2 * int(n))) for n, t in tensors.items())


def test_scratch_is_freed_and_comes_back_as_zeros(backing: Backing) -> None:
    weights, gradients = torch.ones(4), torch.full((6,), 3.0)
    view = gradients[2:]
    store = OffloadStore(backing, weights=always(w=weights), scratch=always(g=gradients, v=view))
    store.sleep()
    assert storage_bytes(weights, gradients) == [0, 0]
    store.wake_up()
    assert weights.tolist() == [1.0] * 4
    assert gradients.tolist() == [0.0] * 6
    view[0] = 7.0
    assert gradients[2] == 7.0


def test_a_buffer_that_is_both_state_and_scratch_keeps_its_content(backing: Backing) -> None:
    shared = torch.arange(8.0)
    store = OffloadStore(backing, weights=always(w=shared[:4]), scratch=always(g=shared[4:]))
    store.sleep()
    store.wake_up()
    assert shared.tolist() == list(range(8))


def test_sleeping_and_waking_twice_changes_nothing(backing: Backing) -> None:
    weights = torch.arange(3.0)
    store = OffloadStore(backing, weights=always(w=weights))
    store.wake_up()
    store.sleep()
    store.sleep()
    assert weights.untyped_storage().nbytes() == 0
    store.wake_up()
    weights += 1
    store.wake_up()
    assert weights.tolist() == [1.0, 2.0, 3.0]


def test_without_any_state_it_sleeps_all_the_same(backing: Backing) -> None:
    store = OffloadStore(backing, weights=dict)
    store.sleep()
    assert store.asleep
    store.wake_up()
    assert not store.asleep


def test_weights_stay_for_an_update_and_leave_after_it(backing: Backing) -> None:
    weights, moments = torch.arange(5.0), torch.full((3,), 2.0)
    store = OffloadStore(backing, weights=always(w=weights), others=always(m=moments))
    store.sleep(keep_weights=True)
    assert store.asleep
    assert storage_bytes(weights, moments) == [20, 0]
    assert store.read("w", weights).tolist() == [0, 1, 2, 3, 4]
    store.sleep(keep_weights=True)
    assert storage_bytes(weights) == [20]
    store.sleep()
    assert storage_bytes(weights, moments) == [0, 0]
    assert store.read("w", weights).tolist() == [0, 1, 2, 3, 4]
    store.wake_up()
    assert weights.tolist() == [0, 1, 2, 3, 4]
    assert moments.tolist() == [2, 2, 2]


def test_weights_leave_with_the_rest_in_one_cycle_and_after_it_in_another(backing: Backing) -> None:
    weights, moments = torch.arange(5.0), torch.full((3,), 2.0)
    store = OffloadStore(backing, weights=always(w=weights), others=always(m=moments))
    for cycle in range(4):
        store.sleep(keep_weights=cycle % 2 == 1)
        store.sleep()
        assert storage_bytes(weights, moments) == [0, 0]
        store.wake_up()
        assert weights.tolist() == [cycle, 1 + cycle, 2 + cycle, 3 + cycle, 4 + cycle]
        assert moments.tolist() == [2 + cycle] * 3
        weights += 1
        moments += 1


def test_what_can_be_rebuilt_is_kept_only_until_an_update_had_it(backing: Backing) -> None:
    masters, weights, bias = torch.arange(4.0), torch.arange(4).bfloat16(), torch.ones(2)

    def rebuild() -> None:
        weights.copy_(masters)

    store = OffloadStore(
        backing,
        weights=always(w=weights, b=bias),
        others=always(m=masters),
        derived=always(w=weights),
        rebuild=rebuild,
    )
    # No update lies between: engines may still ask for these.
    store.sleep()
    assert store.read("w", weights).tolist() == [0, 1, 2, 3]
    store.wake_up()
    assert weights.tolist() == [0, 1, 2, 3]
    masters.add_(5)
    store.sleep(keep_weights=True)
    assert storage_bytes(weights, masters) == [8, 0]
    store.sleep()
    assert storage_bytes(weights, bias) == [0, 0]
    assert store.read("b", bias).tolist() == [1, 1]
    with pytest.raises(AssertionError, match="made anew"):
        store.read("w", weights)
    store.wake_up()
    assert weights.tolist() == [5, 6, 7, 8]
    assert bias.tolist() == [1, 1]


def test_memory_of_a_copy_that_is_not_made_again_is_given_back() -> None:
    masters, weights, bias = torch.arange(400.0), torch.arange(400).bfloat16(), torch.ones(3)
    backing = HostBacking(slab_bytes=1000)
    store = OffloadStore(
        backing,
        weights=always(b=bias, w=weights),
        others=always(m=masters),
        derived=always(w=weights),
        rebuild=lambda: None,
    )
    # 1600 bytes of masters, 12 of the bias on 64, 800 of weights on 832.
    store.sleep()
    assert backing.num_bytes == 1600 + 64 + 832
    store.wake_up()
    store.sleep(keep_weights=True)
    store.sleep()
    assert backing.num_bytes == 1600 + 64


@pytest.mark.parametrize("sizes", [[1], [CHUNK], [3 * CHUNK + 5, 1, 4096, 17, CHUNK - 1]])
def test_state_larger_than_a_chunk_survives_many_cycles(tmp_path: Path, sizes: list[int]) -> None:
    """Through two chunks of host memory, in a file that does not grow."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        str(n): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for n, size in enumerate(sizes)
    }
    backing = DiskBacking(str(tmp_path), CHUNK)
    store = OffloadStore(
        backing, weights=lambda: dict(list(tensors.items())[:2]), others=lambda: tensors
    )
    grown: list[int] = []
    for cycle in range(4):
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        if cycle % 2:
            store.sleep(keep_weights=True)
        store.sleep()
        assert storage_bytes(*tensors.values()) == [0] * len(sizes)
        read = store.read("0", tensors["0"])
        assert torch.equal(read, expected["0"])
        grown.append(backing._end)
        store.wake_up()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name])
            tensor += 1
    assert grown[1:] == grown[:1] * 3
    assert sum(buffer.numel() for buffer in backing._buffers) <= 2 * CHUNK
    backing.close()


def test_the_directory_is_empty_whatever_happens(tmp_path: Path) -> None:
    """The file has no name: nothing is left when the process is killed."""
    backing = DiskBacking(str(tmp_path / "made" / "here"), CHUNK)
    weights = torch.ones(100_000)
    store = OffloadStore(backing, weights=always(w=weights))
    store.sleep()
    assert list((tmp_path / "made" / "here").iterdir()) == []
    store.wake_up()
    store.close()
    assert weights.sum() == 100_000


@contextmanager
def files_no_larger_than(num_bytes: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_clear_error_and_the_state_is_still_there(tmp_path: Path) -> None:
    weights, moments = torch.arange(4000.0), torch.arange(50_000.0)
    store = OffloadStore(
        DiskBacking(str(tmp_path), CHUNK), weights=always(w=weights), others=always(m=moments)
    )
    with (
        files_no_larger_than(100_000),
        pytest.raises(OffloadError, match=r"--offload-train-disk-dir .* no room for 0.00 GiB"),
    ):
        store.sleep()
    assert not store.asleep
    assert torch.equal(moments, torch.arange(50_000.0))
    # With room again everything goes on.
    store.sleep()
    store.wake_up()
    assert torch.equal(moments, torch.arange(50_000.0))
    assert torch.equal(weights, torch.arange(4000.0))


def test_a_short_write_is_an_error_and_the_state_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.arange(9000.0)
    store = OffloadStore(DiskBacking(str(tmp_path), CHUNK), weights=always(w=weights))
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: len(data) // 2], at))
    with pytest.raises(OffloadError, match="written 4096 of 8192 bytes"):
        store.sleep()
    monkeypatch.undo()
    assert torch.equal(weights, torch.arange(9000.0))
    store.sleep()
    store.wake_up()
    assert torch.equal(weights, torch.arange(9000.0))


def test_a_directory_that_cannot_be_made_names_flag_and_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"--offload-train-disk-dir .*file/x.* no file can be"):
        DiskBacking(str(tmp_path / "file" / "x"), CHUNK)


def test_a_directory_that_vanishes_takes_nothing_along(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    weights = torch.arange(9000.0)
    store = OffloadStore(DiskBacking(str(folder), CHUNK), weights=always(w=weights))
    store.sleep()
    folder.rmdir()
    store.wake_up()
    assert torch.equal(weights, torch.arange(9000.0))
    store.sleep()
    store.wake_up()
    assert torch.equal(weights, torch.arange(9000.0))


def test_a_file_system_without_direct_io_or_nameless_files_serves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="miles")
    opened, controlled = os.open, fcntl.fcntl

    def without_nameless(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, mode)

    def without_direct(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return controlled(descriptor, command, argument)

    monkeypatch.setattr(os, "open", without_nameless)
    monkeypatch.setattr(fcntl, "fcntl", without_direct)
    backing = disk(tmp_path)
    assert "no direct I/O there" in caplog.text
    assert list(tmp_path.iterdir()) == []
    weights = torch.arange(9000.0)
    store = OffloadStore(backing, weights=always(w=weights))
    store.sleep()
    store.wake_up()
    assert torch.equal(weights, torch.arange(9000.0))
    store.close()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_a_disk_that_is_host_memory_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="miles")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = OffloadConfig(offload_train_target="disk", offload_train_disk_dir=folder)
        make_backing(config).close()
    assert f"--offload-train-disk-dir {folder} lies in host memory" in caplog.text
