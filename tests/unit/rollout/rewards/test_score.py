import asyncio
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.config.errors import ConfigError
from miles.config.root import MilesConfig
from miles.contracts.types import Sample, Status
from miles.rollout.rewards import score as score_module
from miles.rollout.rewards.score import make_reward, reward_value, score
from tests.unit.rollout.scripted import made_config, made_prompt

HERE = "tests.unit.rollout.rewards.test_score"
HANG_S = 60.0


def by_response(sample: Sample, config: MilesConfig) -> Any:
    """What the response says that the function does."""
    what = sample.response
    if what == "hang":
        time.sleep(HANG_S)
    if what == "raise":
        raise RuntimeError("no verdict")
    values = {"none": None, "nan": math.nan, "inf": math.inf, "text": "1", "object": {"a": 1}}
    return values.get(what, 0.75)


async def by_response_async(sample: Sample, config: MilesConfig) -> Any:
    if sample.response == "hang":
        await asyncio.sleep(HANG_S)
    return by_response(sample, config)


def of_group(samples: list[Sample], config: MilesConfig) -> list[Any]:
    if samples[0].response == "short":
        return [1.0]
    return [by_response(sample, config) for sample in samples]


calls = list[str]()


def fails_once(sample: Sample, config: MilesConfig) -> float:
    calls.append(sample.response)
    if len(calls) == 1:
        raise ConnectionError("once")
    return np.float32(0.5)  # pyright: ignore[reportReturnType]


def rewards_of(tokenizer: Any, responses: list[str], **changes: Any) -> tuple[int, list[Any]]:
    prompt = made_prompt(4, tokenizer, "q", label="l")
    group = [
        Sample(prompt=prompt, index=8 + i, tokens=[1], response=text, status=Status.COMPLETED)
        for i, text in enumerate(responses)
    ]
    config = made_config(**{"rm_default": -1.0, **changes})
    failures = asyncio.run(score(group, make_reward(config, tokenizer)))
    return len(failures), [sample.reward for sample in group]


BROKEN = ["hang", "raise", "none", "nan", "inf", "text", "object"]


@pytest.mark.parametrize("function", ["by_response", "by_response_async"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_reward_without_value_gets_the_default_and_a_warning_with_the_sample(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, function: str, broken: str
) -> None:
    start = time.monotonic()
    responses = ["fine", broken, "fine"]
    # A busy machine may take a while to call those that answer at once.
    changes = {"rm_timeout_s": 1.0} if broken == "hang" else {}
    result = rewards_of(tokenizer, responses, custom_rm_path=f"{HERE}.{function}", **changes)
    assert result == (1, [0.75, -1.0, 0.75])
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "sample 9 of prompt 4" in warning
    # A time-out has no line of its own in the user's code.
    assert broken != "raise" or f"{Path(__file__).name}:" in warning
    assert time.monotonic() - start < HANG_S


def test_a_group_reward_is_called_once_for_all(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"custom_rm_path": f"{HERE}.of_group", "group_rm": True}
    assert rewards_of(tokenizer, ["a", "nan", "b"], **settings) == (1, [0.75, -1.0, 0.75])
    assert rewards_of(tokenizer, ["short", "b"], **settings) == (2, [-1.0, -1.0])
    assert "must return 2 rewards" in caplog.text


def test_a_failed_call_is_repeated(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "RETRY_DELAY_S", 0.0)
    calls.clear()
    settings = {"custom_rm_path": f"{HERE}.fails_once", "rm_max_retries": 1}
    assert rewards_of(tokenizer, ["x"], **settings) == (0, [0.5])
    assert isinstance(rewards_of(tokenizer, ["x"], **settings)[1][0], float)


def test_an_object_is_kept_when_its_key_has_a_number(tokenizer: Any) -> None:
    settings = {"custom_rm_path": f"{HERE}.by_response"}
    assert rewards_of(tokenizer, ["object"], reward_key="a", **settings) == (0, [{"a": 1.0}])
    assert rewards_of(tokenizer, ["object"], reward_key="b", **settings) == (1, [-1.0])


def test_failed_samples_are_not_scored_and_given_rewards_stay(tokenizer: Any) -> None:
    prompt = made_prompt(0, tokenizer)
    failed = Sample(prompt=prompt, index=0, tokens=[1], response="raise", status=Status.FAILED)
    given = Sample(prompt=prompt, index=1, tokens=[1], response="raise", reward=0.25)
    reward = make_reward(made_config(custom_rm_path=f"{HERE}.by_response"), tokenizer)
    assert asyncio.run(score([failed, given], reward)) == []
    assert (failed.reward, given.reward) == (0.0, 0.25)


def test_the_rows_reward_wins_and_an_unknown_one_is_refused(tokenizer: Any) -> None:
    def one(rm_type: str | None, metadata: dict[str, Any]) -> Any:
        prompt = made_prompt(0, tokenizer, "q", label="a b", metadata=metadata)
        sample = Sample(prompt=prompt, index=0, tokens=[1], response="a c")
        asyncio.run(score([sample], make_reward(made_config(rm_type=rm_type), tokenizer)))
        return sample.reward

    assert one("exact_match", {}) == 0.0
    # Articles do not count: of "c" and "b" nothing is common.
    assert one("exact_match", {"rm_type": "f1"}) == 0.0
    # As in parquet, where a row that names none has null beside rows that do.
    assert one("exact_match", {"rm_type": None}) == 0.0
    for rm_type, metadata, says in (
        (None, {}, "no reward is named"),
        ("exact_match", {"rm_type": "ecxact"}, "no reward is called 'ecxact'"),
    ):
        with pytest.raises(ConfigError, match=f"prompt 0: {says}"):
            one(rm_type, metadata)


def test_evaluation_may_read_another_key(tokenizer: Any) -> None:
    prompt = made_prompt(0, tokenizer)
    sample = Sample(prompt=prompt, index=0, tokens=[1], response="object")
    config = made_config(custom_rm_path=f"{HERE}.by_response", reward_key="b", eval_reward_key="a")
    assert asyncio.run(score([sample], make_reward(config, tokenizer), evaluation=True)) == []


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(2)])
def test_any_number_is_a_reward(value: Any) -> None:
    assert reward_value(value, None) == float(value)
