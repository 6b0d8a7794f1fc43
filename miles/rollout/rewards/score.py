"""Fills in the rewards of a group: time-outs, retries, and a defined value when there is none."""

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.hooks import group_reward, load_hook
from miles.contracts.types import Group, Sample, Status
from miles.core import logging, plugins
from miles.rollout.rewards.table import BOXED_PREFIX, REWARDS, boxed, builtin_of
from miles.rollout.user_call import call_bounded

log = logging.get(__name__)

RETRY_DELAY_S = 0.5
"""Before the first retry; grows with each."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """How a job scores: ``--custom-rm-path``, else the built-in that the row or the flag names."""

    config: MilesConfig
    custom: Callable[..., Any] | None
    """One sample in, or a list of them under ``--group-rm``."""
    end_tokens: tuple[str, ...]
    """Special tokens, which are no part of an answer."""

    async def of_sample(self, sample: Sample) -> Any:
        """What the function returns; not checked yet."""
        if self.custom is not None:
            timeout_s = self.config.reward.rm_timeout_s
            return await call_bounded(self.custom, sample, self.config, timeout_s=timeout_s)
        name = self._builtin_of(sample)
        answer = self._answer(sample)
        if name.startswith(BOXED_PREFIX):
            inner = boxed(answer)
            if inner is None:
                return 0.0
            answer = inner
        result = REWARDS.load(name.removeprefix(BOXED_PREFIX))(sample, answer, self.config)
        return await result if isinstance(result, Awaitable) else result

    async def of_group(self, group: Group) -> Any:
        assert self.custom is not None, "--group-rm is refused without --custom-rm-path"
        timeout_s = self.config.reward.rm_timeout_s
        return await call_bounded(self.custom, group, self.config, timeout_s=timeout_s)

    def _builtin_of(self, sample: Sample) -> str:
        fault = "no reward is named"
        try:
            name = builtin_of(sample.prompt.metadata, self.config)
        except ValueError as error:
            name, fault = None, str(error)
        if name is None:
            remedy = (
                f"prompt {sample.group_id}: {fault}; give --custom-rm-path, --rm-type or the row's "
                "metadata.rm_type"
            )
            raise ConfigError([Problem("--rm-type", self.config.reward.rm_type, remedy)])
        return name

    def _answer(self, sample: Sample) -> str:
        answer = sample.response.rstrip()
        while end := next((t for t in self.end_tokens if answer.endswith(t)), None):
            answer = answer.removesuffix(end).rstrip()
        return answer


def make_reward(config: MilesConfig, tokenizer: Any) -> Reward:
    """The reward of the job. Raises ``PluginError`` for a custom one that cannot be used."""
    path = config.hooks.custom_rm_path
    if path is not None and config.reward.group_rm:
        custom = plugins.load_function(path, group_reward)
    else:
        custom = load_hook("custom_rm_path", path)
    added = tokenizer.added_tokens_decoder.values()
    end_tokens = tuple(token.content for token in added if token.special)
    return Reward(config=config, custom=custom, end_tokens=end_tokens)


def reward_value(reward: Any, key: str | None) -> float:
    """The number in a reward: itself, or under ``key`` in an object.

    Raises ``ValueError`` when there is no finite number.
    """
    value = reward
    if isinstance(reward, Mapping):
        if key is None:
            raise ValueError("the reward is an object, so --reward-key must name its number")
        if key not in reward:
            raise ValueError(f"the reward has no {key!r}; it has {', '.join(map(str, reward))}")
        value = reward[key]
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise ValueError(f"the reward is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def reward_key(config: MilesConfig, evaluation: bool) -> str | None:
    if evaluation and config.reward.eval_reward_key is not None:
        return config.reward.eval_reward_key
    return config.reward.reward_key


class RewardError(RuntimeError):
    """No response at all could be scored."""


async def score(group: Group, reward: Reward, *, evaluation: bool = False) -> list[Exception]:
    """Fill in ``Sample.reward``; an error for each sample that got ``--rm-default`` instead.

    A reward that the generate function has set stays, when it is a number. Failed samples are not
    scored; they get the default too, so that no ``None`` is left. Raises ``ConfigError`` when no
    reward is named.
    """
    key = reward_key(reward.config, evaluation)
    todo = [s for s in group if s.status is not Status.FAILED]
    for sample in group:
        if sample.status is Status.FAILED:
            sample.reward = reward.config.reward.rm_default
    if reward.config.reward.group_rm:
        return await _score_together(todo, reward, key)
    results = await asyncio.gather(*(_score_one(s, reward, key) for s in todo))
    return [error for error in results if error is not None]


async def _score_one(sample: Sample, reward: Reward, key: str | None) -> Exception | None:
    async def call() -> float | dict[str, Any]:
        given = sample.reward if sample.reward is not None else await reward.of_sample(sample)
        return _checked(given, key)

    result = await _with_retries(call, reward.config)
    if isinstance(result, Exception):
        _give_default([sample], result, reward.config)
        return result
    sample.reward = result
    return None


async def _score_together(group: Group, reward: Reward, key: str | None) -> list[Exception]:
    async def call() -> Sequence[Any]:
        rewards = await reward.of_group(group)
        if not isinstance(rewards, Sequence) or len(rewards) != len(group):
            raise ValueError(f"--custom-rm-path must return {len(group)} rewards for the group")
        return rewards

    if not group:
        return []
    result = await _with_retries(call, reward.config)
    if isinstance(result, Exception):
        _give_default(group, result, reward.config)
        return [result] * len(group)
    errors: list[Exception] = []
    for sample, value in zip(group, result, strict=True):
        try:
            sample.reward = _checked(value, key)
        except ValueError as error:
            _give_default([sample], error, reward.config)
            errors.append(error)
    return errors


async def _with_retries[T](call: Callable[[], Awaitable[T]], config: MilesConfig) -> T | Exception:
    """What ``call`` returns, or the last error when every try failed."""
    last: Exception = ValueError("it was not called")
    for attempt in range(config.reward.rm_max_retries + 1):
        if attempt:
            await asyncio.sleep(RETRY_DELAY_S * attempt)
        # Not a try: a reward is user code, and whatever it raises means that it has no value.
        (result,) = await asyncio.gather(call(), return_exceptions=True)
        if isinstance(result, ConfigError | asyncio.CancelledError):
            raise result
        if not isinstance(result, BaseException):
            return result
        if not isinstance(result, Exception):
            raise result
        last = result
    return last


def _checked(reward: Any, key: str | None) -> float | dict[str, Any]:
    number = reward_value(reward, key)
    if key is not None and isinstance(reward, Mapping):
        return {**reward, key: number}
    return number


def _give_default(group: Group, error: Exception, config: MilesConfig) -> None:
    default = config.reward.rm_default
    for sample in group:
        sample.reward = default
        log.warning(
            "sample %d of prompt %d: no reward (--rm-max-retries %d; %s); it counts as %g",
            *(sample.index, sample.group_id, config.reward.rm_max_retries),
            *(describe(error), default),
        )


def describe(error: BaseException) -> str:
    """An error of user code, and the line that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
