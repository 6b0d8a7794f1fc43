"""From a ``MicroBatch`` to what this rank feeds the model, and where its response tokens lie then.

Packed sequences become one row (THD), each padded at its end so that context parallelism can cut it
into ``2 x cp`` equal pieces; else every sequence is a row, padded on the right. Attention is causal
and sequences do not see each other, so that padding changes no real token. Shape letters beside the
usual: ``B`` rows, ``L`` columns that this context-parallel rank holds, ``K`` response tokens that
lie there.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles.backends.megatron_utils.attention import zigzag_indices
from miles.backends.training_utils.packing import padded_inputs
from miles.contracts.types import MicroBatch

PAD_ID = 0
"""Any token id that exists."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How a row is split over ranks."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_split: int = 1
    """Tensor-parallel ranks under sequence parallelism, else 1: they split what a CP rank holds."""

    @property
    def piece(self) -> int:
        """What the length of every sequence must divide by."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def row(self) -> int:
        """What the length of a row must divide by."""
        return math.lcm(self.piece, self.cp_size * self.sequence_split)


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Arguments of the model on this rank, and its share of the response tokens."""

    input_ids: Tensor
    """int64 ``[B, L]``."""
    position_ids: Tensor
    """int64 ``[B, L]``, restarting at 0 for each sequence."""
    padding_mask: Tensor
    """bool ``[B, L]``: True where no token of the batch is; everywhere in a filler."""
    packed_seq_params: PackedSeqParams | None
    """Where the sequences lie before the split over ranks; ``None`` for padded rows."""
    index_K: Tensor
    """int64: this rank's response tokens in the flattened hidden states ``[L, B, H]``."""
    place_K: Tensor
    """int64: their places in ``R``."""


def model_input(batch: MicroBatch, axes: Axes) -> ModelInput:
    """Lay the micro-batch out for the rank that ``axes`` describes."""
    return _packed(batch, axes) if batch.packed else _padded(batch, axes)


def filler_like(batch: MicroBatch) -> MicroBatch:
    """A micro-batch without response tokens: it only takes part in the collectives."""

    def none(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:0]

    cut: dict[str, Any] = {
        name: none(value)
        for name, value in vars(batch).items()
        if name.endswith("_R") and (value is None or isinstance(value, Tensor))
    }
    return dataclasses.replace(
        batch,
        **cut,
        tokens_T=torch.zeros_like(batch.tokens_T[:2]),
        position_ids_T=torch.arange(2, device=batch.tokens_T.device),
        cu_seqlens_S=torch.tensor([0, 2], dtype=torch.int32, device=batch.tokens_T.device),
        max_seqlen=2,
        rewards_S=torch.zeros_like(batch.rewards_S[:1]),
        sample_positions=(),
    )


def num_tokens(batch: MicroBatch) -> int:
    """Tokens of the batch's samples; none in a filler."""
    return len(batch.tokens_T) if batch.sample_positions else 0


def _packed(batch: MicroBatch, axes: Axes) -> ModelInput:
    where = batch.tokens_T.device
    lengths_S = batch.cu_seqlens_S.diff().tolist()
    padded_S = [_round_up(length, axes.piece) for length in lengths_S]
    tail = -sum(padded_S) % axes.row
    if tail:
        # A sequence of its own, so that the last real one does not see it.
        padded_S.append(tail)
    padded = torch.tensor(padded_S, device=where)
    cu_seqlens = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    total = sum(padded_S)
    # Where each token goes: the padding before its sequence shifts it.
    shift_S = cu_seqlens[: len(lengths_S)] - batch.cu_seqlens_S[:-1]
    sequence_T = torch.repeat_interleave(
        torch.arange(len(lengths_S), device=where),
        batch.cu_seqlens_S.diff().long(),
        output_size=len(batch.tokens_T),
    )
    place_T = torch.arange(len(batch.tokens_T), device=where) + shift_S[sequence_T]
    tokens = batch.tokens_T.new_full((total,), PAD_ID)
    tokens[place_T] = batch.tokens_T
    padding = _padding(batch, total, place_T)
    starts = torch.repeat_interleave(cu_seqlens[:-1], padded, output_size=total)
    positions = torch.arange(total, device=where) - starts
    held, found_R = _share(cu_seqlens, place_T[batch.logit_index_R], axes)
    place_K = (found_R >= 0).nonzero().squeeze(1)
    cu = cu_seqlens.int()
    longest = max(padded_S)
    return ModelInput(
        input_ids=tokens[held][None],
        position_ids=positions[held][None],
        padding_mask=padding[held][None],
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        index_K=found_R[place_K],
        place_K=place_K,
    )


def _padded(batch: MicroBatch, axes: Axes) -> ModelInput:
    length = _round_up(batch.max_seqlen, axes.row)
    ids, mask, _, _ = padded_inputs(dataclasses.replace(batch, max_seqlen=length), PAD_ID)
    if not batch.sample_positions:
        mask = torch.zeros_like(mask)
    column_R = batch.position_ids_T[batch.logit_index_R]
    whole_row = torch.tensor([0, length], device=ids.device)
    held, found_R = _share(whole_row, column_R, axes)
    place_K = (found_R >= 0).nonzero().squeeze(1)
    columns = torch.arange(length, device=ids.device)[held]
    return ModelInput(
        input_ids=ids[:, held],
        position_ids=columns.expand(len(ids), -1),
        padding_mask=mask[:, held] == 0,
        packed_seq_params=None,
        index_K=found_R[place_K] * len(ids) + batch.sequence_R[place_K],
        place_K=place_K,
    )


def _share(cu_seqlens: Tensor, place_R: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """The places that this rank holds, in its order, and where each of ``place_R`` is among them
    (-1: on another rank)."""
    total = int(cu_seqlens[-1])
    if axes.cp_size == 1:
        return torch.arange(total, device=cu_seqlens.device), place_R
    held = zigzag_indices(cu_seqlens, axes.cp_size, axes.cp_rank)
    found = torch.full((total,), -1, device=held.device)
    found[held] = torch.arange(len(held), device=held.device)
    return held, found[place_R]


def _padding(batch: MicroBatch, total: int, place_T: Tensor) -> Tensor:
    padding = torch.ones(total, dtype=torch.bool, device=place_T.device)
    if batch.sample_positions:
        padding[place_T] = False
    return padding


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
