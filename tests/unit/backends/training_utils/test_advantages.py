import math
from typing import Any

import pytest
import torch

from miles.backends.training_utils.advantages import compute_advantages, whiten
from miles.contracts.parallel import ParallelState
from tests.unit.backends.training_utils.made_batches import NAN, algorithm, logs, micro_batch

ALONE = ParallelState(rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=None)


def advantages(batch: Any, **flags: Any) -> list[float]:
    (filled,) = compute_advantages([batch], algorithm(**flags), ALONE)
    assert filled.advantages_R is not None
    assert filled.advantages_R.dtype == torch.float32
    return filled.advantages_R.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "reinforce_plus_plus_baseline"])
def test_every_trainable_token_gets_the_samples_reward(estimator: str) -> None:
    batch = micro_batch([[1, 0, 1], [], [1]], rewards=[0.5, 9.0, -2.0])
    assert advantages(batch, advantage_estimator=estimator) == [0.5, 0.0, 0.5, -2.0]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "reinforce_plus_plus_baseline"])
def test_kl_to_the_reference_lowers_each_tokens_reward(estimator: str) -> None:
    batch = micro_batch(
        [[1, 1, 0]],
        rewards=[1.0],
        old_log_probs_R=logs(0.5, 0.25, 0.5),
        ref_log_probs_R=logs(0.25, 0.5, 0.1),
    )
    got = advantages(batch, advantage_estimator=estimator, kl_coef=0.1)
    assert got == pytest.approx([1 - 0.1 * math.log(2), 1 + 0.1 * math.log(2), 0.0])


def test_kl_in_the_reward_can_use_the_engines_log_probs() -> None:
    batch = micro_batch(
        [[1, 1]],
        rewards=[1.0],
        rollout_log_probs_R=[math.log(0.5), NAN],
        ref_log_probs_R=logs(0.25, 0.5),
    )
    got = advantages(batch, kl_coef=0.1, use_rollout_logprobs=True)
    assert got == pytest.approx([1 - 0.1 * math.log(2), 1.0])


def test_reinforce_plus_plus_discounts_from_the_last_trainable_token() -> None:
    # The reward 8 stands at the third token; 0.5 a place; the last token is masked.
    batch = micro_batch([[1, 1, 1, 0], [1]], rewards=[8.0, 3.0])
    got = advantages(batch, advantage_estimator="reinforce_plus_plus", gamma=0.5)
    assert got == [2.0, 4.0, 8.0, 0.0, 3.0]


def test_reinforce_plus_plus_adds_up_kl_penalties() -> None:
    # r = -0.1 * (ln 2, 0, -ln 2) with 1 at the end; gamma 1.
    batch = micro_batch(
        [[1, 1, 1]],
        rewards=[1.0],
        old_log_probs_R=logs(0.5, 0.5, 0.25),
        ref_log_probs_R=logs(0.25, 0.5, 0.5),
    )
    got = advantages(batch, advantage_estimator="reinforce_plus_plus", kl_coef=0.1)
    last = 1 + 0.1 * math.log(2)
    assert got == pytest.approx([last - 0.1 * math.log(2), last, last])


def test_discounted_returns_of_a_long_response_follow_the_recursion() -> None:
    length, gamma = 37, 0.9
    reference = [math.sin(i) for i in range(length)]
    batch = micro_batch(
        [[1] * 5, [1] * length],
        rewards=[0.0, 2.0],
        old_log_probs_R=[0.0] * (length + 5),
        ref_log_probs_R=[0.0] * 5 + reference,
    )
    got = advantages(batch, advantage_estimator="reinforce_plus_plus", kl_coef=1.0, gamma=gamma)
    expected, following = [], 0.0
    for i in reversed(range(length)):
        following = reference[i] + (2.0 if i == length - 1 else 0.0) + gamma * following
        expected.insert(0, following)
    assert got[5:] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_an_empty_response_puts_its_reward_nowhere(estimator: str) -> None:
    batch = micro_batch([[1, 1], [], [1]], rewards=[-1.0, 10.0, 1.0])
    assert advantages(batch, advantage_estimator=estimator) == [-1.0, -1.0, 1.0]
    assert advantages(micro_batch([[]], rewards=[10.0]), advantage_estimator=estimator) == []


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_fully_masked_response_puts_its_reward_nowhere(estimator: str) -> None:
    batch = micro_batch([[0, 0], [1]], rewards=[10.0, 1.0])
    assert advantages(batch, advantage_estimator=estimator) == [0.0, 0.0, 1.0]


def test_whitening_is_over_trainable_tokens() -> None:
    # Values 1, 1, 4 (a masked 100): mean 2, unbiased variance 3.
    values, masks = [torch.tensor([1.0, 100.0, 1.0]), torch.tensor([4.0])], [[1, 0, 1], [1]]
    got = whiten(values, [torch.tensor(m) for m in masks], ALONE)
    root = math.sqrt(3)
    assert got[0].tolist() == pytest.approx([-1 / root, 0, -1 / root])
    assert got[1].tolist() == pytest.approx([2 / root])


def test_whitening_equal_or_single_or_no_values_gives_zeros() -> None:
    for values in ([0.1] * 7, [0.1], []):
        (got,) = whiten([torch.tensor(values)], [torch.ones(len(values))], ALONE)
        assert got.tolist() == pytest.approx([0.0] * len(values), abs=1e-9)
    assert whiten([], [], ALONE) == []


def test_whitening_is_a_switch() -> None:
    batch = micro_batch([[1], [1], [1]], rewards=[1.0, 1.0, 4.0])
    root = math.sqrt(3)
    assert advantages(batch, normalize_advantages=True) == pytest.approx(
        [-1 / root, -1 / root, 2 / root]
    )
