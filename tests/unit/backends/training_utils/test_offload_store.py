import torch
from torch import Tensor

from miles.backends.training_utils.offload_store import HostStore


def storage_bytes(*tensors: Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_views_of_one_buffer_are_freed_together_and_come_back_whole() -> None:
    buffer = torch.arange(12, dtype=torch.float32)
    # As DDP lays out its parameters: the buffer itself has bytes that no parameter names.
    first, second = buffer[:4].view(2, 2), buffer[6:10]
    alone = torch.tensor([1.5, -2.5], dtype=torch.bfloat16)
    store = HostStore(lambda: {"first": first, "second": second, "alone": alone})
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


def test_scratch_is_freed_and_comes_back_as_zeros() -> None:
    weights, gradients = torch.ones(4), torch.full((6,), 3.0)
    view = gradients[2:]
    store = HostStore(lambda: {"w": weights}, lambda: {"g": gradients, "view": view})
    store.sleep()
    assert storage_bytes(weights, gradients) == [0, 0]
    store.wake_up()
    assert weights.tolist() == [1.0] * 4
    assert gradients.tolist() == [0.0] * 6
    view[0] = 7.0
    assert gradients[2] == 7.0


def test_a_buffer_that_is_both_state_and_scratch_keeps_its_content() -> None:
    shared = torch.arange(8.0)
    store = HostStore(lambda: {"w": shared[:4]}, lambda: {"g": shared[4:]})
    store.sleep()
    store.wake_up()
    assert shared.tolist() == list(range(8))


def test_sleeping_and_waking_twice_changes_nothing() -> None:
    weights = torch.arange(3.0)
    store = HostStore(lambda: {"w": weights})
    store.wake_up()
    store.sleep()
    store.sleep()
    assert weights.untyped_storage().nbytes() == 0
    store.wake_up()
    weights += 1
    store.wake_up()
    assert weights.tolist() == [1.0, 2.0, 3.0]


def test_without_any_state_it_sleeps_all_the_same() -> None:
    store = HostStore(dict)
    store.sleep()
    assert store.asleep
    store.wake_up()
    assert not store.asleep
