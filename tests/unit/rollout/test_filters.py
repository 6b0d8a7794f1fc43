from typing import Any

from miles.contracts.types import Sample, Status
from miles.rollout.filters import check_no_aborted, check_reward_nonzero_std
from tests.unit.rollout.scripted import made_config, made_prompt


def group_of(tokenizer: Any, rewards: list[Any]) -> list[Sample]:
    prompt = made_prompt(0, tokenizer)
    return [Sample(prompt=prompt, index=i, tokens=[1], reward=r) for i, r in enumerate(rewards)]


def test_equal_rewards_are_dropped_whatever_the_rounding(tokenizer: Any) -> None:
    sums = [0.1, 0.3 - 0.2, 0.7 - 0.6, 0.1]
    assert len(set(sums)) > 1
    for rewards in ([0.1] * 8, sums, [0.0, 0.0], [1e6, 1e6 + 1e-3]):
        decision = check_reward_nonzero_std(group_of(tokenizer, rewards), made_config())
        assert not decision.keep
    assert decision.reason == "zero_std_1000000.0"


def test_different_rewards_are_kept(tokenizer: Any) -> None:
    for rewards in ([0.0, 1.0], [0.1, 0.2, 0.1], [{"a": 0.0, "b": 1}, {"a": 0.5, "b": 1}]):
        group = group_of(tokenizer, rewards)
        assert check_reward_nonzero_std(group, made_config(reward_key="a")).keep


def test_the_default_reward_of_a_failed_sample_is_no_difference(tokenizer: Any) -> None:
    for rewards, num_failed in (([1.0, 1.0, 0.0], 1), ([1.0, 0.0, 0.0], 2), ([0.0, 0.0], 2)):
        group = group_of(tokenizer, rewards)
        for sample in group[-num_failed:]:
            sample.status = Status.FAILED
        assert not check_reward_nonzero_std(group, made_config()).keep
    group = group_of(tokenizer, [1.0, 0.5, 0.0])
    group[2].status = Status.FAILED
    assert check_reward_nonzero_std(group, made_config()).keep


def test_a_group_of_one_sample_is_kept(tokenizer: Any) -> None:
    assert check_reward_nonzero_std(group_of(tokenizer, [0.0]), made_config()).keep


def test_a_group_with_an_aborted_sample_is_dropped(tokenizer: Any) -> None:
    group = group_of(tokenizer, [0.0, 1.0])
    assert check_no_aborted(group, made_config()).keep
    group[1].status = Status.ABORTED
    assert not check_no_aborted(group, made_config()).keep
