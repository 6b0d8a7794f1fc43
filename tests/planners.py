"""Planners of DCP that tell what they were asked for."""

import io

from torch import Tensor, UntypedStorage
from torch.distributed.checkpoint.planner import WriteItem

from miles.backends.training_utils.dcp_writing import OneCopyPlanner


class Watched(OneCopyPlanner):
    """``most``: bytes of all tensors that it has given so far, at the fullest moment."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._given: list[UntypedStorage] = []

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor)
        self._given.append(data.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self._given))
        return data
