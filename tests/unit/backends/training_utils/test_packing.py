import dataclasses

import torch

from miles.backends.training_utils.packing import build_micro_batches, padded_inputs, with_fields
from miles.config.algorithm import AlgorithmConfig
from miles.config.data import DataConfig
from miles.config.root import MilesConfig
from miles.contracts.types import MicroBatch, TrainBatch
from miles.rollout.batch import make_batches
from tests.unit.rollout.made_samples import made_groups, made_sample

CPU = torch.device("cpu")
CONFIG = MilesConfig(data=DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=100))


def three_samples() -> TrainBatch:
    """Prompts of 2, 1 and 3 tokens, responses of 2, 0 and 3, in one micro-batch."""
    samples = [
        made_sample(1.0, prompt=2, response=2, index=0, tokens=[1, 2, 3, 4], loss_mask=[0, 1]),
        made_sample(2.0, prompt=1, response=0, index=1, tokens=[5]),
        made_sample(6.0, prompt=3, response=3, index=2, tokens=[6, 7, 8, 9, 10, 11]),
    ]
    (batch,) = make_batches([samples], CONFIG, 0, 1)
    return batch


def only(steps: list[list[MicroBatch]]) -> MicroBatch:
    ((batch,),) = steps
    return batch


def test_every_field_of_a_packed_micro_batch() -> None:
    shard = three_samples()
    batch = only(build_micro_batches(shard, packed=True, device=CPU))
    assert batch.sample_positions == (0, 1, 2)
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]
    assert batch.cu_seqlens_S.tolist() == [0, 4, 5, 11]
    assert batch.max_seqlen == 6
    assert batch.logit_index_R.tolist() == [1, 2, 7, 8, 9]
    assert batch.targets_R.tolist() == [3, 4, 9, 10, 11]
    assert batch.sequence_R.tolist() == [0, 0, 2, 2, 2]
    assert batch.loss_mask_R.tolist() == [0, 1, 1, 1, 1]
    assert batch.rollout_log_probs_R is not None
    torch.testing.assert_close(
        batch.rollout_log_probs_R, torch.tensor([-0.1, -0.2, -0.1, -0.2, -0.3])
    )
    assert batch.rewards_S.tolist() == shard.rewards.tolist()
    assert batch.packed
    assert batch.old_log_probs_R is batch.ref_log_probs_R is batch.advantages_R is None


def test_dtypes_are_those_of_the_contract() -> None:
    batch = only(build_micro_batches(three_samples(), packed=True, device=CPU))
    for name in ("tokens_T", "position_ids_T", "logit_index_R", "targets_R", "sequence_R"):
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.cu_seqlens_S.dtype == torch.int32
    for name in ("loss_mask_R", "rollout_log_probs_R", "rewards_S"):
        assert getattr(batch, name).dtype == torch.float32, name


def test_the_order_of_samples_is_the_schedules() -> None:
    shard = with_schedule(three_samples(), ((2,), (1, 0)))
    first, second = build_micro_batches(shard, packed=True, device=CPU)[0]
    assert first.tokens_T.tolist() == [6, 7, 8, 9, 10, 11]
    assert first.logit_index_R.tolist() == [2, 3, 4]
    assert second.tokens_T.tolist() == [5, 1, 2, 3, 4]
    assert second.logit_index_R.tolist() == [2, 3]
    assert second.targets_R.tolist() == [3, 4]
    assert second.sequence_R.tolist() == [1, 1]
    assert second.rewards_S.tolist() == shard.rewards[[1, 0]].tolist()


def with_schedule(shard: TrainBatch, step: tuple[tuple[int, ...], ...]) -> TrainBatch:
    return dataclasses.replace(shard, micro_batches=(step,))


def test_an_empty_entry_of_the_schedule_becomes_a_filler() -> None:
    shard = with_schedule(three_samples(), ((0, 1, 2), ()))
    _, filler = build_micro_batches(shard, packed=True, device=CPU)[0]
    assert filler.sample_positions == ()
    assert filler.num_sequences == 1
    assert filler.tokens_T.shape == (2,)
    assert filler.position_ids_T.tolist() == [0, 1]
    assert filler.cu_seqlens_S.tolist() == [0, 2]
    for name in ("logit_index_R", "targets_R", "sequence_R", "loss_mask_R", "rollout_log_probs_R"):
        assert getattr(filler, name).shape == (0,), name


def test_padded_rows_hold_the_same_tokens_at_the_flat_index() -> None:
    batch = only(build_micro_batches(three_samples(), packed=False, device=CPU))
    assert not batch.packed
    input_ids, attention_mask, position_ids, flat_index_T = padded_inputs(batch, pad_id=99)
    assert input_ids.tolist() == [
        [1, 2, 3, 4, 99, 99],
        [5, 99, 99, 99, 99, 99],
        [6, 7, 8, 9, 10, 11],
    ]
    assert attention_mask.tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert flat_index_T.tolist() == [0, 1, 2, 3, 6, 12, 13, 14, 15, 16, 17]
    assert torch.equal(input_ids.flatten()[flat_index_T], batch.tokens_T)


def test_fields_are_replaced_in_a_copy() -> None:
    batch = only(build_micro_batches(three_samples(), packed=True, device=CPU))
    filled = with_fields(batch, advantages_R=torch.ones(5))
    assert filled.advantages_R is not None
    assert batch.advantages_R is None
    assert filled.tokens_T is batch.tokens_T


def test_supervised_micro_batches_have_no_engine_log_probs() -> None:
    config = MilesConfig(data=CONFIG.data, algorithm=AlgorithmConfig(loss_type="sft_loss"))
    batches = make_batches(made_groups([[1.0]]), config, 0, 2)
    for shard in batches:
        batch = only(build_micro_batches(shard, packed=True, device=CPU))
        assert batch.rollout_log_probs_R is None


def test_targets_follow_their_logits_in_every_micro_batch_of_a_real_schedule() -> None:
    groups = made_groups([[1.0] * 9], responses=[0, 5, 9, 1, 40, 12, 3, 3, 8])
    for shard in make_batches(groups, CONFIG, 0, 2):
        for batch in build_micro_batches(shard, packed=True, device=CPU)[0]:
            assert torch.equal(batch.tokens_T[batch.logit_index_R + 1], batch.targets_R)
            owner = torch.searchsorted(
                batch.cu_seqlens_S.long(), batch.logit_index_R + 1, right=True
            )
            assert torch.equal(owner - 1, batch.sequence_R)
