"""``TrainBatch`` arrays to ``MicroBatch`` tensors, packed rows or padded ones."""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.contracts.types import MicroBatch, TrainBatch


def build_micro_batches(
    shard: TrainBatch, *, packed: bool, device: torch.device
) -> list[list[MicroBatch]]:
    """The shard's schedule as tensors on ``device``: ``[step][micro-batch]``.

    An empty entry of the schedule becomes a filler: one sequence of two tokens, ``R == 0``.
    """
    return [
        [
            _pack(shard, positions, packed, device) if positions else _filler(shard, packed, device)
            for positions in step
        ]
        for step in shard.micro_batches
    ]


def with_fields(batch: MicroBatch, **tensors: Tensor | None) -> MicroBatch:
    """A copy of ``batch`` with some fields replaced."""
    return dataclasses.replace(batch, **tensors)  # pyright: ignore[reportArgumentType]


def padded_inputs(batch: MicroBatch, pad_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sequences of a micro-batch as rows, padded on the right to ``max_seqlen`` (``L``).

    Returns int64 ``input_ids [S, L]``, ``attention_mask [S, L]`` (1 at tokens), ``position_ids
    [S, L]`` and ``flat_index_T``: where each packed token lies in the flattened ``[S * L]``, so
    that ``hidden_SxLxH.flatten(0, 1)[flat_index_T]`` is in the packed order that
    ``logit_index_R`` counts in.
    """
    num_rows, length = batch.num_sequences, batch.max_seqlen
    lengths_S = batch.cu_seqlens_S.diff().long()
    row_T = torch.repeat_interleave(
        torch.arange(num_rows, device=lengths_S.device), lengths_S, output_size=len(batch.tokens_T)
    )
    flat_index_T = row_T * length + batch.position_ids_T
    input_ids = batch.tokens_T.new_full((num_rows * length,), pad_id)
    input_ids[flat_index_T] = batch.tokens_T
    columns_L = torch.arange(length, device=lengths_S.device)
    attention_mask = (columns_L < lengths_S[:, None]).long()
    position_ids = columns_L.expand(num_rows, length)
    return input_ids.view(num_rows, length), attention_mask, position_ids, flat_index_T


def _pack(
    shard: TrainBatch, positions: tuple[int, ...], packed: bool, device: torch.device
) -> MicroBatch:
    chosen = np.array(positions)
    starts, ends = shard.token_offsets[chosen], shard.token_offsets[chosen + 1]
    lengths, responses = ends - starts, shard.response_lengths[chosen].astype(np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    tokens_T = _ranges(starts, lengths)
    # The logits one place before a token predict it.
    logit_index_R = _ranges(cu_seqlens[1:] - responses - 1, responses)
    response_R = _ranges(shard.response_offsets[chosen], responses)
    tokens = shard.tokens_T[tokens_T].astype(np.int64)

    def move(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens_T=move(tokens),
        position_ids_T=move(_ranges(np.zeros_like(lengths), lengths)),
        cu_seqlens_S=move(cu_seqlens.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        logit_index_R=move(logit_index_R),
        targets_R=move(tokens[logit_index_R + 1]),
        sequence_R=move(np.repeat(np.arange(len(chosen)), responses)),
        loss_mask_R=move(shard.loss_mask_R[response_R].astype(np.float32)),
        rollout_log_probs_R=(
            None
            if shard.rollout_log_probs_R is None
            else move(shard.rollout_log_probs_R[response_R].astype(np.float32))
        ),
        rewards_S=move(shard.rewards[chosen].astype(np.float32)),
        sample_positions=tuple(positions),
        packed=packed,
    )


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[s, s + 1, ..., s + l - 1]`` for each start and length, concatenated."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _filler(shard: TrainBatch, packed: bool, device: torch.device) -> MicroBatch:
    def zeros(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return MicroBatch(
        tokens_T=zeros(2, torch.int64),
        position_ids_T=torch.arange(2, device=device),
        cu_seqlens_S=torch.tensor([0, 2], dtype=torch.int32, device=device),
        max_seqlen=2,
        logit_index_R=zeros(0, torch.int64),
        targets_R=zeros(0, torch.int64),
        sequence_R=zeros(0, torch.int64),
        loss_mask_R=zeros(0, torch.float32),
        rollout_log_probs_R=(
            None if shard.rollout_log_probs_R is None else zeros(0, torch.float32)
        ),
        rewards_S=zeros(1, torch.float32),
        sample_positions=(),
        packed=packed,
    )
