"""A module of transformers as the attention of a Megatron layer, in every layout of ranks.

The module sees whole documents: the tokens that sequence and context parallelism divide are
gathered, put into order and cut into documents, and each rank goes on with its own tokens of the
result. All ranks of a sample compute it with the same weights; tensor parallelism divides only what
surrounds it. Shape letters: ``B`` rows, ``L`` their length, ``T`` tokens of a packed row, ``H``
hidden size, ``N`` tokens that this rank holds of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from miles.backends.megatron_utils.attention import zigzag_indices
from miles.backends.training_utils.packed_attention import Documents

_CACHED_LAYOUTS = 16


class HFAttention(MegatronModule, ABC):
    """Stands in the place of Megatron's ``SelfAttention``. A subclass makes the module and calls
    ``adopt`` with its parameters, and computes rows in ``attend``.
    """

    def __init__(
        self, config: Any, layer_number: int, pg_collection: Any = None, **others: Any
    ) -> None:
        """Megatron passes ``others`` too: how its own attention moves keys between ranks, names."""
        del others
        super().__init__(config=config)
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group: Any = groups.tp
        self.cp_group: Any = groups.cp

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have their gradients summed over the ranks that each see only their own tokens' part.

        For context parallelism Megatron does so with every parameter.
        """
        for parameter in parameters:
            parameter.sequence_parallel = self.config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    @abstractmethod
    def attend(self, hidden_BxLxH: Tensor) -> Tensor:
        """Rows that each begin with the first token of a document, to the same shape.

        Rows are padded on the right: no token may depend on a later one. A packed row whose
        documents differ in length gives several calls, for documents of like length.
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """``[N, B, H]`` to the same, and no bias. Positions come from the place of a token in its
        document, not from the rotary embeddings among ``others``."""
        del others
        if attention_mask is not None:
            raise ValueError("this attention is causal: pass no mask")
        whole = self._gather(hidden_states)
        if packed_seq_params is None:
            bounds = _row_bounds(len(whole), whole.device)
        else:
            bounds = _bounds_of(packed_seq_params)
        # How context-parallel ranks hold the tokens, and the way back.
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        if cp_size > 1:
            whole = whole.index_select(0, _places(bounds, cp_size))
        if packed_seq_params is None:
            out = self.attend(whole.transpose(0, 1)).transpose(0, 1)
        else:
            out = self._attend_documents(whole[:, 0], bounds)[:, None]
        if cp_size > 1:
            out = out.index_select(0, _held(bounds, cp_size, cp_rank))
        return self._own_part(out).contiguous(), None

    def _gather(self, hidden_states: Tensor) -> Tensor:
        """The tokens of all ranks of the sample, rank by rank. The backward pass sums over ranks:
        each has used all tokens for the results of its own."""
        for group, divides in self._divisions():
            if divides:
                hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        return hidden_states

    def _divisions(self) -> tuple[tuple[Any, bool], ...]:
        """Sequence parallelism divides what a context-parallel rank holds."""
        divides = self.config.sequence_parallel and self.tp_group.size() > 1
        return (self.tp_group, divides), (self.cp_group, self.cp_group.size() > 1)

    def _own_part(self, out: Tensor) -> Tensor:
        (group, divides), _ = self._divisions()
        return out.chunk(group.size())[group.rank()] if divides else out

    def _attend_documents(self, hidden_TxH: Tensor, bounds: Tensor) -> Tensor:
        indices, rows_T = _documents(bounds).batches
        parts = [
            self.attend(
                hidden_TxH.index_select(0, index_BxL.flatten()).unflatten(0, index_BxL.shape)
            )
            for index_BxL in indices
        ]
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, rows_T)


def _bounds_of(params: Any) -> Tensor:
    if params.qkv_format != "thd" or params.local_cp_size is not None:
        raise ValueError("packed rows are thd, over the one context-parallel group")
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded


# The same tensor of bounds comes with every layer of a micro-batch.


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _row_bounds(length: int, where: torch.device) -> Tensor:
    return torch.tensor([0, length], dtype=torch.int32, device=where)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _documents(bounds: Tensor) -> Documents:
    return Documents(bounds, int(bounds.diff().max()))


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _held(bounds: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    return zigzag_indices(bounds, cp_size, cp_rank)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _places(bounds: Tensor, cp_size: int) -> Tensor:
    """Where each token of the row is among those gathered rank by rank."""
    return torch.cat([_held(bounds, cp_size, rank) for rank in range(cp_size)]).argsort()
