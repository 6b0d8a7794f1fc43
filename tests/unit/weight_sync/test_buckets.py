"""Buckets: every weight once, bounded, one dtype, contiguous, read no further than needed."""

from collections.abc import Iterator

import pytest
import torch

from miles.contracts.types import NamedTensor
from miles.weight_sync.buckets import bucketize


def floats(name: str, count: int, dtype: torch.dtype = torch.float32) -> NamedTensor:
    return NamedTensor(name=name, tensor=torch.arange(count, dtype=dtype))


def layout(weights: list[NamedTensor], max_bytes: int) -> list[tuple[str, ...]]:
    return [tuple(t.name for t in b.tensors) for b in bucketize(weights, max_bytes)]


def test_weights_are_packed_in_order_up_to_the_bound() -> None:
    weights = [floats("a", 2), floats("b", 2), floats("c", 1), floats("d", 4)]
    assert layout(weights, 20) == [("a", "b", "c"), ("d",)]
    assert layout(weights, 16) == [("a", "b"), ("c",), ("d",)]


def test_a_tensor_above_the_bound_is_alone() -> None:
    weights = [floats("a", 1), floats("huge", 100), floats("b", 1)]
    assert layout(weights, 8) == [("a",), ("huge",), ("b",)]


def test_a_bucket_has_one_dtype_and_open_buckets_share_the_bound() -> None:
    half = torch.bfloat16
    weights = [floats("a", 2), floats("h", 2, half), floats("b", 2), floats("i", 2, half)]
    assert layout(weights, 100) == [("a", "b"), ("h", "i")]
    # a and h hold 12 of 16 bytes; b does not fit, so the largest open bucket (a) goes first.
    assert layout(weights, 16) == [("a",), ("h", "i"), ("b",)]


def test_no_weights_make_no_bucket() -> None:
    assert layout([], 16) == []


def test_a_transposed_tensor_arrives_as_equal_contiguous_bytes() -> None:
    source = torch.arange(6.0).reshape(2, 3).t()
    (bucket,) = bucketize([NamedTensor(name="t", tensor=source)], 1024)
    sent = bucket.tensors[0].tensor
    assert sent.is_contiguous()
    assert sent.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert bucket.specs[0].shape == (3, 2)


def test_a_zero_size_and_a_scalar_tensor_travel_too() -> None:
    weights = [floats("empty", 0), NamedTensor(name="scalar", tensor=torch.tensor(3.0))]
    assert layout(weights, 4) == [("empty", "scalar")]


def test_weights_are_read_only_as_far_as_the_next_bucket_needs() -> None:
    read: list[int] = []

    def stream() -> Iterator[NamedTensor]:
        for i in range(100):
            read.append(i)
            yield floats(str(i), 1)

    next(bucketize(stream(), 8))
    assert read == [0, 1, 2]


def test_a_bound_of_zero_bytes_is_refused_by_flag() -> None:
    with pytest.raises(ValueError, match="--update-weight-buffer-size 0"):
        next(bucketize([], 0))
