from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.training_utils.hf_files import HFFiles
from miles.backends.training_utils.safetensors_file import DTYPES, SafetensorsFile

SHAPES = {"matrix": (3, 5), "odd": (7,), "scalar": (), "empty": (0, 4), "größe": (2,)}


def made_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"{name}.{code}": (8 * torch.randn(shape)).to(dtype)
        for code, dtype in DTYPES.items()
        for name, shape in SHAPES.items()
    }


def test_the_file_is_the_librarys_byte_for_byte_whatever_the_order(tmp_path: Path) -> None:
    tensors = made_tensors()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    headers = HFFiles(tmp_path).headers
    streamed = SafetensorsFile(tmp_path / "streamed", list(headers.values()))
    for name in reversed(tensors):
        streamed.write(name, tensors[name])
    streamed.close()
    expected = (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "streamed").read_bytes() == expected


def test_a_tensor_that_is_not_contiguous_is_written_in_its_own_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    save_file({"a": tensor.contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    streamed = SafetensorsFile(tmp_path / "streamed", HFFiles(tmp_path).headers.values())
    streamed.write("a", tensor)
    streamed.close()
    assert load_file(tmp_path / "streamed")["a"].equal(tensor)


def test_a_file_that_lacks_a_tensor_is_never_finished(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    streamed = SafetensorsFile(tmp_path / "streamed", HFFiles(tmp_path).headers.values())
    streamed.write("a", torch.ones(1))
    with pytest.raises(AssertionError, match="never written: b"):
        streamed.close()
    streamed.abandon()
