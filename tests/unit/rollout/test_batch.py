import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from miles.config.algorithm import AlgorithmConfig
from miles.config.data import DataConfig
from miles.config.hooks import HooksConfig
from miles.config.reward import RewardConfig
from miles.config.root import MilesConfig
from miles.contracts.types import Group, Status, TrainBatch
from miles.rollout.batch import batch_metrics, is_zero_variance, make_batches
from tests.unit.rollout.made_samples import made_groups, made_sample

HERE = "tests.unit.rollout.made_samples"


def made_config(*, data: dict[str, Any] | None = None, **algorithm: Any) -> MilesConfig:
    return MilesConfig(
        algorithm=AlgorithmConfig(**algorithm),
        data=DataConfig(
            **{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, **(data or {})}
        ),
    )


def one_batch(groups: list[Group], config: MilesConfig | None = None) -> TrainBatch:
    (batch,) = make_batches(groups, config or made_config(), rollout_id=5, dp_size=1)
    return batch


def rewards(groups: list[Group], **flags: Any) -> list[float]:
    return one_batch(groups, made_config(**flags)).rewards.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_group_rewards_are_centred_and_divided_by_the_unbiased_deviation(estimator: str) -> None:
    # Mean 3, deviations -2, 0, 2: unbiased variance 4.
    expected = [-2 / 2.000001, 0, 2 / 2.000001]
    assert rewards(made_groups([[1, 3, 5]]), advantage_estimator=estimator) == pytest.approx(
        expected, rel=1e-6
    )


def test_statistics_are_per_prompt_group_of_any_size() -> None:
    groups = made_groups([[0, 0, 0, 4], [1, 3, 5], [10, 20]])
    got = rewards(groups, grpo_std_normalization=False)
    assert got == [-1, -1, -1, 3, -2, 0, 2, -5, 5]
    scaled = rewards(groups)
    expected = [-0.5, -0.5, -0.5, 1.5, -1, 0, 1, -math.sqrt(0.5), math.sqrt(0.5)]
    assert scaled == pytest.approx(expected, rel=1e-5)


def test_reinforce_baseline_only_subtracts_the_mean() -> None:
    got = rewards(made_groups([[1, 3, 5]]), advantage_estimator="reinforce_plus_plus_baseline")
    assert got == [-2, 0, 2]


def test_reinforce_plus_plus_and_switched_off_normalisation_keep_raw_rewards() -> None:
    groups = made_groups([[1, 3, 5]])
    assert rewards(groups, advantage_estimator="reinforce_plus_plus") == [1, 3, 5]
    assert rewards(groups, rewards_normalization=False) == [1, 3, 5]


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e6 + 0.1, 0.0])
def test_a_group_of_equal_rewards_has_zero_advantage(value: float) -> None:
    groups = made_groups([[value] * 8])
    assert rewards(groups) == [0.0] * 8
    assert batch_metrics(groups, made_config())["rollout/zero_std_ratio"] == 1


def test_float32_rounding_is_no_difference() -> None:
    group = [0.1, float(np.float32(0.1)), 0.1, 0.30000000000000004 - 0.2]
    assert rewards(made_groups([group])) == [0.0] * 4
    assert is_zero_variance(group)
    assert not is_zero_variance([0.1, 0.1001])


def test_a_single_sample_is_its_own_mean_and_not_zero_variance() -> None:
    groups = made_groups([[0.7], [0.2]])
    assert rewards(groups) == [0.0, 0.0]
    assert one_batch(groups).raw_rewards.tolist() == pytest.approx([0.7, 0.2])
    assert not is_zero_variance([0.7])
    assert batch_metrics(groups, made_config())["rollout/zero_std_ratio"] == 0


def test_an_empty_response_counts_in_its_group_and_nowhere_else() -> None:
    # Rewards 10, 1, 4: mean 5. The peers keep -4 and -1.
    groups = made_groups([[10, 1, 4]], responses=[0, 2, 3])
    batch = one_batch(groups, made_config(grpo_std_normalization=False))
    assert batch.rewards.tolist() == [5, -4, -1]
    assert batch.response_lengths.tolist() == [0, 2, 3]
    assert batch.step_num_samples == (2,)
    assert batch.step_num_tokens == (5,)


def test_a_removed_sample_counts_in_its_group_but_is_masked() -> None:
    groups = made_groups([[1, 3, 8]])
    groups[0][2].remove_sample = True
    batch = one_batch(groups, made_config(grpo_std_normalization=False))
    assert batch.rewards.tolist() == [-3, -1, 4]
    assert batch.loss_mask_R.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.step_num_samples == (2,)
    assert batch.step_num_tokens == (6,)


def test_a_failed_sample_is_no_part_of_statistics_or_training() -> None:
    groups = made_groups([[1, 3]])
    failed = made_sample(None, index=2, status=Status.FAILED, loss_mask=[1], rollout_log_probs=[])
    groups[0].append(failed)
    batch = one_batch(groups, made_config(grpo_std_normalization=False))
    assert batch.rewards.tolist() == [-1, 1, 0]
    assert batch.num_samples == 3
    assert batch.response_lengths.tolist() == [3, 3, 0]
    assert batch.step_num_samples == (2,)


def test_a_rollout_where_everything_failed_has_nothing_to_train() -> None:
    groups = [[made_sample(None, index=i, status=Status.FAILED) for i in range(3)]]
    batches = make_batches(groups, made_config(), 0, 2)
    assert [b.step_num_tokens for b in batches] == [(0,), (0,)]
    assert sum(b.num_samples for b in batches) == 3


def test_a_reward_object_needs_its_key() -> None:
    groups = [[made_sample({"score": 1.0, "format": 0.0}), made_sample({"score": 3.0}, index=1)]]
    config = made_config(grpo_std_normalization=False)
    keyed = dataclasses.replace(config, reward=RewardConfig(reward_key="score"))
    assert one_batch(groups, keyed).rewards.tolist() == [-1, 1]
    with pytest.raises(ValueError, match="--reward-key must name"):
        one_batch(groups, config)
    missing = dataclasses.replace(config, reward=RewardConfig(reward_key="format"))
    with pytest.raises(ValueError, match="sample 1: the reward has no 'format'"):
        one_batch(groups, missing)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "good"])
def test_a_reward_that_is_no_number_names_its_sample(reward: Any) -> None:
    with pytest.raises(ValueError, match="sample 7: the reward"):
        one_batch([[made_sample(reward, index=7)]])


def test_supervised_samples_need_no_reward_and_carry_no_log_probs() -> None:
    groups = [[made_sample(None, rollout_log_probs=[math.nan] * 3)]]
    batch = one_batch(groups, made_config(loss_type="sft_loss"))
    assert batch.rollout_log_probs_R is None
    assert batch.step_num_tokens == (3,)
    assert "rollout/raw_reward" not in batch_metrics(groups, made_config(loss_type="sft_loss"))


def test_a_missing_engine_log_prob_stays_nan() -> None:
    batch = one_batch([[made_sample(1.0, rollout_log_probs=[-0.5, math.nan, -0.25])]])
    np.testing.assert_array_equal(batch.rollout_log_probs_R, [-0.5, np.nan, -0.25])


def test_inconsistent_samples_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 4: response_length 3"):
        one_batch([[made_sample(1.0, index=4, loss_mask=[1])]])
    with pytest.raises(ValueError, match="sample 4: it has no prompt token"):
        one_batch([[made_sample(1.0, index=4, prompt=0)]])
    with pytest.raises(ValueError, match="sample 4: its loss mask"):
        one_batch([[made_sample(1.0, index=4, loss_mask=[1, 2, 0])]])


def test_users_can_replace_the_normalisation() -> None:
    def hooked(name: str) -> MilesConfig:
        hooks = HooksConfig(custom_reward_post_process_path=f"{HERE}.{name}")
        return dataclasses.replace(made_config(), hooks=hooks)

    assert one_batch(made_groups([[1, 2]]), hooked("user_rewards")).rewards.tolist() == [12, 22]
    with pytest.raises(ValueError, match="must return 2 finite numbers"):
        one_batch(made_groups([[1, 2]]), hooked("wrong_rewards"))


def test_the_arrays_hold_each_sample_once_in_order_and_are_read_only() -> None:
    groups = made_groups([[1, 2], [3, 4]], responses=[1, 2, 3, 4])
    batches = make_batches(groups, made_config(data={"global_batch_size": 3}), 5, 2)
    samples = {s.index: s for group in groups for s in group}
    assert sorted(i for b in batches for i in b.sample_indices.tolist()) == [0, 1, 2, 3]
    for batch in batches:
        assert batch.rollout_id == 5
        assert batch.num_steps == 2
        for k, index in enumerate(batch.sample_indices.tolist()):
            sample = samples[index]
            tokens = slice(*batch.token_offsets[k : k + 2])
            response = slice(*batch.response_offsets[k : k + 2])
            assert batch.tokens_T[tokens].tolist() == sample.tokens
            assert batch.loss_mask_R[response].tolist() == sample.loss_mask
            assert batch.rollout_log_probs_R is not None
            assert batch.rollout_log_probs_R[response].tolist() == pytest.approx(
                sample.rollout_log_probs
            )
            assert batch.response_lengths[k] == sample.response_length
            assert batch.group_ids[k] == sample.group_id
            assert batch.raw_rewards[k] == sample.reward
        arrays = [v for v in vars(batch).values() if isinstance(v, np.ndarray)]
        assert len(arrays) == 10
        assert not any(array.flags.writeable for array in arrays)
    assert batches[0].step_num_samples == batches[1].step_num_samples == (3, 1)
    assert batches[0].step_num_tokens == batches[1].step_num_tokens == (6, 4)


def test_schedule_positions_are_the_ranks_own() -> None:
    groups = made_groups([[1, 2, 3, 4, 5]], responses=[5, 4, 3, 2, 1])
    for batch in make_batches(groups, made_config(data={"global_batch_size": 2}), 0, 2):
        flat = [i for step in batch.micro_batches for micro in step for i in micro]
        assert sorted(flat) == list(range(batch.num_samples))
        steps = [
            {int(batch.sample_indices[i]) // 2 for micro in step for i in micro}
            for step in batch.micro_batches
        ]
        assert all(indices <= {k} for k, indices in enumerate(steps))


def test_static_batches_follow_the_micro_batch_size() -> None:
    config = made_config(data={"use_dynamic_batch_size": False, "micro_batch_size": 2})
    batch = one_batch(made_groups([[1, 2, 3, 4, 5]]), config)
    assert sorted(len(micro) for micro in batch.micro_batches[0]) == [1, 2, 2]


def test_no_samples_give_no_steps() -> None:
    batches = make_batches([], made_config(), 0, 2)
    assert [(b.num_samples, b.num_steps) for b in batches] == [(0, 0), (0, 0)]


def test_batch_metrics() -> None:
    groups = made_groups([[1, 1], [0, 4]], responses=[1, 2, 3, 6])
    groups[0][0].status = Status.TRUNCATED
    groups[1][1].status = Status.FAILED
    groups[1][0].weight_versions = [3, 4]
    groups[0][1].remove_sample = True
    assert batch_metrics(groups, made_config()) == {
        "rollout/num_samples": 4,
        "rollout/response_len/mean": 3,
        "rollout/response_len/median": 2.5,
        "rollout/response_len/max": 6,
        "rollout/response_len/min": 1,
        "rollout/truncated_ratio": 0.25,
        "rollout/aborted_ratio": 0,
        "rollout/failed_ratio": 0.25,
        "rollout/removed_ratio": 0.25,
        "rollout/zero_std_ratio": 0.5,
        "rollout/raw_reward": pytest.approx(2 / 3),
        "rollout/weight_version/min": 1,
        "rollout/weight_version/max": 4,
    }
