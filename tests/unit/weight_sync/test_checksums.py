"""Checksums: of the bytes in C order, whatever dtype or stride holds them."""

from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from miles.weight_sync import checksums
from miles.weight_sync.checksums import checksum, compare


def test_the_digest_is_xxh3_128_of_the_bytes_in_c_order() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    raw = np.array([1, 2, 3, 4], dtype="<f4").tobytes()
    assert checksum(tensor) == xxhash.xxh3_128(raw).hexdigest()
    transposed = np.array([1, 3, 2, 4], dtype="<f4").tobytes()
    assert checksum(tensor.t()) == xxhash.xxh3_128(transposed).hexdigest()


@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        # 1.0 is 0x3f80 in bf16 and 0x3c00 in fp16.
        (torch.ones(2, dtype=torch.bfloat16), b"\x80\x3f\x80\x3f"),
        (torch.ones(2, dtype=torch.float16), b"\x00\x3c\x00\x3c"),
        (torch.ones(1, dtype=torch.float8_e4m3fn), b"\x38"),
        (torch.tensor([True, False]), b"\x01\x00"),
        (torch.tensor(-1, dtype=torch.int16), b"\xff\xff"),
        (torch.empty(3, 0), b""),
        (torch.nn.Parameter(torch.zeros(1)), b"\0\0\0\0"),
    ],
)
def test_every_dtype_and_shape_has_its_bytes_digested(tensor: torch.Tensor, raw: bytes) -> None:
    assert checksum(tensor) == xxhash.xxh3_128(raw).hexdigest()


def test_negative_zero_and_zero_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_pieces_give_the_digest_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 96)
    assert checksum(tensor) == whole


class OnADevice(torch.Tensor):
    """Host memory that behaves like a device's: ``cpu`` is a copy that nobody else holds."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_a_device_tensor_is_digested_before_its_copy_is_freed() -> None:
    tensor = torch.randn(64)
    assert checksum(tensor.as_subclass(OnADevice)) == checksum(tensor)


def test_compare_names_every_difference_and_the_side_that_lacks_a_tensor() -> None:
    assert compare({"a": "1"}, {"a": "1"}) == []
    assert compare({"a": "1", "b": "2", "c": "3"}, {"b": "x", "c": "3", "d": "4"}) == [
        "a: the engine does not have it",
        "b: trainer 2, engine x",
        "d: the trainer did not send it",
    ]


def test_a_digest_leaves_the_storage_resizable() -> None:
    tensor = torch.arange(6.0)
    checksum(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
