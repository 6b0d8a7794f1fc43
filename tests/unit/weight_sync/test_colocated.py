"""Segments of shared memory: where tensors lie in them, when they go, and no room for one."""

import os
from concurrent.futures import Future

import pytest
import torch

from miles.contracts.engine import EngineError
from miles.contracts.types import NamedTensor, WeightBucket
from miles.weight_sync.colocated import ColocatedTransport, Slot
from miles.weight_sync.shared_memory import ShmSegment, fill, layout


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"miles-{os.getpid()}-")]


def bucket(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> WeightBucket:
    return WeightBucket(
        tensors=tuple(
            NamedTensor(name=str(i), tensor=torch.full((n,), i + 1.0, dtype=dtype))
            for i, n in enumerate(sizes)
        )
    )


def test_tensors_start_at_multiples_of_64_bytes() -> None:
    assert layout(bucket(3, 32, 33, 0, 1)) == ([0, 64, 128, 256, 256], 258)
    assert layout(bucket()) == ([], 0)


def test_a_filled_segment_holds_each_tensors_bytes_at_its_offset() -> None:
    segment = ShmSegment()
    tensors = bucket(2, 0, 1)
    offsets, num_bytes = layout(tensors)
    shm = segment.reserve(num_bytes)
    fill(shm, tensors, offsets)
    assert shm.buf is not None
    # bf16: 1.0 is 0x3f80, 3.0 is 0x4040.
    assert bytes(shm.buf[:4]) == b"\x80\x3f\x80\x3f"
    assert bytes(shm.buf[64:66]) == b"\x40\x40"
    segment.release()
    assert segments() == []


def test_a_segment_is_kept_until_a_larger_one_is_needed() -> None:
    segment = ShmSegment()
    first = segment.reserve(4096).name
    assert segment.reserve(100).name == first
    assert segment.reserve(4097).name != first
    assert len(segments()) == 1
    segment.release()
    segment.release()
    assert segments() == []


def test_a_slot_waits_for_the_loads_that_read_it_and_raises_their_failure() -> None:
    slot = Slot(ShmSegment())
    done: Future[None] = Future()
    done.set_result(None)
    load: Future[None] = Future()
    slot.submitted([done, load])
    with pytest.raises(TimeoutError):
        slot.wait(0.01)
    slot.submitted([done, load])
    load.set_exception(EngineError("no such tensor"))
    with pytest.raises(EngineError, match="no such tensor"):
        slot.wait(1)
    slot.wait(0)


def test_too_little_shared_memory_is_an_error_that_names_the_remedy_and_leaves_nothing() -> None:
    segment = ShmSegment()
    system = os.statvfs("/dev/shm")
    with pytest.raises(OSError, match=r"--shm-size\) or lower --update-weight-buffer-size"):
        segment.reserve((system.f_blocks + 1) * system.f_frsize)
    segment.release()
    assert segments() == []


def test_closing_a_transport_that_never_sent_is_nothing() -> None:
    transport = ColocatedTransport(timeout_s=1)
    transport.finish()
    transport.close()
    transport.close()
