from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from miles.backends.training_utils.dcp_writing import write
from tests.planners import Watched


def test_host_memory_holds_one_copy_at_a_time_and_what_was_saved_stays(tmp_path: Path) -> None:
    whole = torch.arange(3000.0)
    tensors = {
        "view": whole[:1000],
        "turned": whole[1000:3000].view(40, 50).T,
        "own": torch.arange(500, dtype=torch.bfloat16),
        "same for all": torch.ones(1).expand(700),
        "empty": torch.zeros(0),
    }
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    planner = Watched()
    write(tmp_path, dict(tensors), None, planner)
    assert planner.most == 4 * 2000
    read = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    load(read, checkpoint_id=tmp_path, no_dist=True)
    for name, expected in kept.items():
        assert torch.equal(tensors[name], expected), name
        assert torch.equal(read[name], expected), name
