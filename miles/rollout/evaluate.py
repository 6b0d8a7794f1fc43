"""Evaluation sets to metrics: every prompt of every set, answered and scored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.config.root import MilesConfig
from miles.contracts.hooks import GenerateContext, Generator
from miles.contracts.types import Group, Prompt, Sample, Status
from miles.rollout.generate import run_together
from miles.rollout.rewards.score import reward_key, reward_value, score
from miles.rollout.steps import Steps, generate_group, make_steps, sampling_params, seeded

PASS_REWARD = 1.0 - 1e-6
"""A response with at least this reward has solved its prompt (pass@k)."""


async def evaluate(
    rollout_id: int,
    sets: Mapping[str, Sequence[Prompt]],
    config: MilesConfig,
    engines: Generator,
    tokenizer: Any,
) -> tuple[dict[str, float], dict[str, list[Sample]]]:
    """Metrics under ``eval/<set>``, and the samples of each set in order of its prompts.

    All sets run at once, or one after the other under ``--deterministic-rollout``. Raises
    ``GenerationError`` when a prompt cannot be answered: a mean over fewer prompts would be
    another metric.
    """
    steps = make_steps(config, tokenizer)
    groups = {name: list[Group]() for name in sets}

    async def run(name: str) -> None:
        context = GenerateContext(
            config=config,
            engines=engines,
            tokenizer=tokenizer,
            params=sampling_params(config, evaluation=True),
            num_samples=config.evaluation.n_samples_per_eval_prompt,
            evaluation=True,
            first_index=0,
        )
        contexts = _contexts(context, f"eval:{rollout_id}:{name}", len(sets[name]))
        seeded_contexts = [seeded(c, rollout_id) for c in contexts]
        groups[name] = await _answer(steps, sets[name], seeded_contexts)

    if config.rollout.deterministic_rollout:
        for name in sets:
            await run(name)
    else:
        await run_together(run(name) for name in sets)
    metrics = dict[str, float]()
    for name in sets:
        metrics |= set_metrics(name, groups[name], config)
    return metrics, {name: [s for group in groups[name] for s in group] for name in sets}


def _contexts(context: GenerateContext, key: str, num_prompts: int) -> list[GenerateContext]:
    """One for each prompt of a set."""
    deterministic = context.config.rollout.deterministic_rollout
    return [
        replace(
            context,
            first_index=position * context.num_samples,
            admission=(key, position, num_prompts) if deterministic else None,
        )
        for position in range(num_prompts)
    ]


async def _answer(
    steps: Steps, prompts: Sequence[Prompt], contexts: Sequence[GenerateContext]
) -> list[Group]:
    """Generate and score the groups of one set, in order."""

    async def answer(prompt: Prompt, context: GenerateContext) -> Group:
        group = await generate_group(steps, prompt, context)
        await score(group, steps.reward, evaluation=True)
        return group

    pairs = zip(prompts, contexts, strict=True)
    return await run_together(answer(prompt, context) for prompt, context in pairs)


def set_metrics(name: str, groups: Sequence[Group], config: MilesConfig) -> dict[str, float]:
    """``eval/<name>`` is the mean reward; under ``--log-passrate`` also pass@k."""
    samples = [sample for group in groups for sample in group]
    key = reward_key(config, evaluation=True)
    rewards = [[reward_value(s.reward, key) for s in group] for group in groups]
    lengths = [sample.response_length for sample in samples]
    truncated = sum(sample.status is Status.TRUNCATED for sample in samples)
    prefix = f"eval/{name}"
    metrics = {
        prefix: sum(map(sum, rewards)) / len(samples),
        f"{prefix}/response_len/mean": sum(lengths) / len(samples),
        f"{prefix}/response_len/max": float(max(lengths)),
        f"{prefix}/truncated_ratio": truncated / len(samples),
    }
    if config.evaluation.log_passrate:
        k = 1
        while k <= config.evaluation.n_samples_per_eval_prompt:
            passed = [pass_at_k([r >= PASS_REWARD for r in group], k) for group in rewards]
            metrics[f"{prefix}/pass@{k}"] = sum(passed) / len(passed)
            k *= 2
    return metrics


def pass_at_k(solved: Sequence[bool], k: int) -> float:
    """Chance that at least one of ``k`` of these responses, drawn without repeating, has solved
    the prompt: 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021),
    https://arxiv.org/abs/2107.03374."""
    return 1.0 - math.comb(len(solved) - sum(solved), k) / math.comb(len(solved), k)
