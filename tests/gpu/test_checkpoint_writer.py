"""DCP's writer with tensors of an accelerator."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from miles.backends.training_utils.checkpoint_writer import files_of
from miles.core import device


def test_a_save_keeps_no_pinned_memory(tmp_path: Path) -> None:
    where = device.current_device()
    tensors = {str(number): torch.rand(3 << 20, device=where) for number in range(4)}
    before = device.pinned_bytes()
    save(dict(tensors), storage_writer=files_of(tmp_path), no_dist=True)
    assert device.pinned_bytes() == before
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
