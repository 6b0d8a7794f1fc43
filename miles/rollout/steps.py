"""The steps that a group passes through, and generation of one group with retries.

Training rollouts and evaluation share them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from miles.config.root import MilesConfig
from miles.contracts.engine import SamplingParams
from miles.contracts.hooks import GenerateContext, load_hook
from miles.contracts.types import Group, Prompt, Sample, Status
from miles.core import logging
from miles.rollout.generate import generate, sampling_seed
from miles.rollout.rewards.score import Reward, make_reward

log = logging.get(__name__)

MAX_TRIES = 3
"""Of generating one group, before the run stops."""
RETRY_DELAY_S = 1.0
"""Before the second try; grows with each."""


class GenerationError(RuntimeError):
    """A prompt whose generation failed again and again; names the prompt."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What happens to a group on its way; ``None`` where the job has no such step."""

    generate: Callable[[Prompt, GenerateContext], Awaitable[list[Sample]]]
    reward: Reward
    dynamic_filter: Callable[..., Any] | None = None
    sample_filter: Callable[..., Any] | None = None
    all_samples_process: Callable[..., Any] | None = None


def make_steps(config: MilesConfig, tokenizer: Any) -> Steps:
    """The built-in steps and the user's. Raises ``PluginError`` for one that cannot be used."""
    hooks = config.hooks
    custom = load_hook("custom_generate_function_path", hooks.custom_generate_function_path)
    return Steps(
        generate=custom if custom is not None else generate,
        reward=make_reward(config, tokenizer),
        dynamic_filter=load_hook(
            "dynamic_sampling_filter_path", hooks.dynamic_sampling_filter_path
        ),
        sample_filter=load_hook("rollout_sample_filter_path", hooks.rollout_sample_filter_path),
        all_samples_process=load_hook(
            "rollout_all_samples_process_path", hooks.rollout_all_samples_process_path
        ),
    )


def sampling_params(config: MilesConfig, *, evaluation: bool) -> SamplingParams:
    """The flags' sampling parameters; evaluation's own where they are given."""
    rollout, own = config.rollout, config.evaluation
    max_new_tokens = rollout.rollout_max_response_len
    if evaluation and own.eval_max_response_len is not None:
        max_new_tokens = own.eval_max_response_len
    assert max_new_tokens is not None, "validated when flags are parsed"
    params = SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=max_new_tokens,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )
    if not evaluation:
        return params
    return replace(
        params,
        temperature=params.temperature if own.eval_temperature is None else own.eval_temperature,
        top_p=params.top_p if own.eval_top_p is None else own.eval_top_p,
        top_k=params.top_k if own.eval_top_k is None else own.eval_top_k,
    )


def seeded(context: GenerateContext, rollout_id: int) -> GenerateContext:
    """The context with a seed for each sample, under ``--deterministic-rollout``."""
    config = context.config
    if not config.rollout.deterministic_rollout:
        return context
    seeds = tuple(
        sampling_seed(config.data.rollout_seed, rollout_id, context.first_index + position)
        for position in range(context.num_samples)
    )
    return replace(context, params=replace(context.params, sampling_seeds=seeds))


async def generate_group(steps: Steps, prompt: Prompt, context: GenerateContext) -> Group:
    """Run the generate function, again when it fails, and check what it returns.

    Raises ``GenerationError``, which names the prompt, after ``MAX_TRIES``.
    """
    last: Exception | None = None
    for attempt in range(1, MAX_TRIES + 1):
        await asyncio.sleep(RETRY_DELAY_S * (attempt - 1))
        # Not a try: a generate function is user code, and whatever it raises is its failure.
        (result,) = await asyncio.gather(
            _generate_checked(steps, prompt, context), return_exceptions=True
        )
        if not isinstance(result, BaseException):
            return result
        if not isinstance(result, Exception):
            raise result
        last = result
        # Its companions may be done: a key that was completed once is not completed again.
        context = replace(context, admission=None)
        log.warning(
            "prompt %d: generation failed (try %d of %d): %s: %s",
            *(prompt.group_id, attempt, MAX_TRIES, type(result).__name__, result),
        )
    raise GenerationError(
        f"prompt {prompt.group_id} ({prompt.text[:200]!r}) could not be generated in {MAX_TRIES} "
        f"tries; the last one: {type(last).__name__}: {last}"
    ) from last


async def _generate_checked(steps: Steps, prompt: Prompt, context: GenerateContext) -> Group:
    group = await steps.generate(prompt, context)
    wanted = list(range(context.first_index, context.first_index + context.num_samples))
    given = [sample.index for sample in group]
    if given != wanted:
        raise ValueError(
            f"the generate function must return samples {wanted} in order, it returned {given}"
        )
    for sample in group:
        sample.validate()
        if context.evaluation and sample.status is Status.ABORTED:
            raise ValueError(f"sample {sample.index} was aborted in the middle of an evaluation")
    return group
