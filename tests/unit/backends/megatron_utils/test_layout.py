"""What a rank feeds the model: every token and response token exactly once, padding marked."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from miles.backends.megatron_utils.layout import Axes, filler_like, model_input, num_tokens
from miles.backends.training_utils.packing import build_micro_batches
from miles.contracts.types import MicroBatch, TrainBatch

LENGTHS, RESPONSES = [5, 9, 2], [3, 4, 1]
AXES = [
    Axes(),
    Axes(sequence_split=4),
    Axes(cp_size=2),
    Axes(cp_size=3),
    Axes(cp_size=2, sequence_split=2),
    Axes(cp_size=2, sequence_split=3),
]


def make_batch(packed: bool) -> MicroBatch:
    """Three samples whose tokens are 100, 101, ... in order."""
    total = sum(LENGTHS)
    shard = TrainBatch(
        rollout_id=0,
        tokens_T=np.arange(100, 100 + total, dtype=np.int32),
        token_offsets=np.cumsum([0, *LENGTHS]),
        response_lengths=np.array(RESPONSES, dtype=np.int32),
        loss_mask_R=np.ones(sum(RESPONSES), dtype=np.int32),
        response_offsets=np.cumsum([0, *RESPONSES]),
        rollout_log_probs_R=None,
        rewards=np.zeros(3, dtype=np.float32),
        raw_rewards=np.zeros(3, dtype=np.float32),
        sample_indices=np.arange(3),
        group_ids=np.zeros(3, dtype=np.int64),
        micro_batches=(((0, 1, 2),),),
        step_num_samples=(3,),
        step_num_tokens=(sum(RESPONSES),),
    )
    return build_micro_batches(shard, packed=packed, device=torch.device("cpu"))[0][0]


def ranks_of(axes: Axes) -> list[Axes]:
    return [
        Axes(cp_size=axes.cp_size, cp_rank=rank, sequence_split=axes.sequence_split)
        for rank in range(axes.cp_size)
    ]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_token_lies_on_one_rank_with_its_position(axes: Axes, packed: bool) -> None:
    batch = make_batch(packed)
    seen: list[tuple[int, int]] = []
    for rank in ranks_of(axes):
        inputs = model_input(batch, rank)
        assert inputs.input_ids.shape == inputs.position_ids.shape == inputs.padding_mask.shape
        real = ~inputs.padding_mask
        seen += zip(
            inputs.input_ids[real].tolist(), inputs.position_ids[real].tolist(), strict=True
        )
    assert sorted(seen) == list(
        zip(batch.tokens_T.tolist(), batch.position_ids_T.tolist(), strict=True)
    )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_each_response_token_is_found_where_it_is_predicted(axes: Axes, packed: bool) -> None:
    batch = make_batch(packed)
    found = torch.full((len(batch.targets_R),), -1)
    for rank in ranks_of(axes):
        inputs = model_input(batch, rank)
        hidden_LxB = inputs.input_ids.T.contiguous()
        assert (found[inputs.place_K] == -1).all()
        found[inputs.place_K] = hidden_LxB.flatten()[inputs.index_K]
    assert (found + 1 == batch.targets_R).all()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_lengths_divide_as_the_ranks_need(axes: Axes, packed: bool) -> None:
    for batch in (make_batch(packed), filler_like(make_batch(packed))):
        shapes = [model_input(batch, rank).input_ids.shape for rank in ranks_of(axes)]
        assert len(set(shapes)) == 1
        assert shapes[0][1] % axes.sequence_split == 0


def test_packed_sequences_are_cut_in_equal_pieces_and_the_tail_is_one_of_its_own() -> None:
    axes = Axes(cp_size=2, sequence_split=3)
    params = model_input(make_batch(True), axes).packed_seq_params
    assert params is not None
    # 5, 9 and 2 tokens become multiples of 4; the row becomes one of lcm(4, 2 x 3) = 12.
    assert params.cu_seqlens_q.tolist() == [0, 8, 20, 24]
    assert math.lcm(4, 6) == 12
    longer = model_input(make_batch(True), Axes(cp_size=2, sequence_split=5)).packed_seq_params
    assert longer is not None
    assert longer.cu_seqlens_q.tolist() == [0, 8, 20, 24, 40]
    assert longer.max_seqlen_q == 16


def test_a_context_parallel_rank_holds_an_early_and_a_late_piece() -> None:
    def row(cp_rank: int) -> Tensor:
        return model_input(make_batch(True), Axes(cp_size=2, cp_rank=cp_rank)).position_ids[0]

    # The first sequence is padded to 8: pieces 0 and 3 on rank 0, 1 and 2 on rank 1.
    assert row(0)[:4].tolist() == [0, 1, 6, 7]
    assert row(1)[:4].tolist() == [2, 3, 4, 5]


def test_a_filler_holds_padding_alone() -> None:
    for packed in (True, False):
        filler = filler_like(make_batch(packed))
        inputs = model_input(filler, Axes())
        assert inputs.padding_mask.all()
        assert len(inputs.index_K) == 0
        assert num_tokens(filler) == 0
