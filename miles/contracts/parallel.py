"""The axis sizes and groups that code shared by both backends may ask for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Where this rank sits. Axes that a backend does not have are 1."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: "ProcessGroup | None"
    """Ranks that hold different samples; ``None`` when there is one."""
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    def dp_sum(self, tensor: "Tensor") -> "Tensor":
        """Return the sum of ``tensor`` over data-parallel ranks; collective."""
        if self.dp_group is None:
            return tensor
        import torch.distributed as dist

        total = tensor.clone()
        dist.all_reduce(total, group=self.dp_group)
        return total
