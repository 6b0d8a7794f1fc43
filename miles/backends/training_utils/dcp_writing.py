"""PyTorch's distributed checkpoint (DCP), written with one tensor at a time in host memory."""

import io
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save


class OneCopyPlanner(DefaultSavePlanner):
    """Copies a tensor to the host when it is written, and frees that copy before the next one.

    DCP's writer makes such copies itself, but keeps them until the file is whole (``tensor_dict``
    in its ``filesystem.py``, which only safetensors need): all of a rank's part, in host memory.
    """

    _copy: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._copy is not None:
            # The writer still holds the tensor, so that its storage has to go by itself.
            self._copy.untyped_storage().resize_(0)
            self._copy = None
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            # Also of what is on the host: it may be a view of much, or made for this call alone.
            data = self._copy = data.detach().to("cpu", copy=True)
        return data


def write(
    directory: Path,
    tensors: dict[str, Any],
    group: dist.ProcessGroup | None,
    planner: OneCopyPlanner,
) -> None:
    """Write one DCP directory; all is on the disk when this returns.

    Collective over ``group``; ``None``: this process alone.
    """
    # To copy ahead the writer pins the next power of two for each tensor in flight, and PyTorch
    # keeps that: 4 GiB for the embeddings of a 0.6B model and their optimizer state.
    files = FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0)
    save(tensors, storage_writer=files, planner=planner, process_group=group, no_dist=group is None)
