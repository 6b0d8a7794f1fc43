"""DCP's writer with tensors of an accelerator."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from miles.backends.training_utils.dcp_writing import write
from miles.core import device
from tests.planners import Watched


def test_a_save_keeps_no_host_memory(tmp_path: Path) -> None:
    where = device.current_device()
    tensors = {str(number): torch.rand(3 << 20, device=where) for number in range(4)}
    before = device.pinned_bytes()
    planner = Watched()
    write(tmp_path, dict(tensors), None, planner)
    assert device.pinned_bytes() == before
    assert planner.most == 12 << 20
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
