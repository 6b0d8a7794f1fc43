"""Hooks that make the work of a step the same on both sides: every response has full length."""

import time
from collections.abc import Sequence
from dataclasses import replace

from miles.config.root import MilesConfig
from miles.contracts.hooks import GenerateContext
from miles.contracts.types import Group, Prompt, Sample
from miles.rollout.generate import generate as generate_single_turn

MODULUS = 7


async def generate(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Single turn; an end token does not end a response. Each sample notes when it was made."""
    params = replace(context.params, ignore_eos=True)
    start = time.perf_counter()
    samples = await generate_single_turn(prompt, replace(context, params=params))
    for sample in samples:
        sample.metadata |= {"start_s": start, "end_s": time.perf_counter()}
    return samples


def score(token_ids: Sequence[int]) -> float:
    """Some number in [0, 1) that differs between samples; ``trl_step.py`` has the same."""
    return sum(token_ids) % MODULUS / MODULUS


def reward(sample: Sample, config: MilesConfig) -> float:
    """Raises ``ValueError`` for a response that is not of full length."""
    wanted = config.rollout.rollout_max_response_len
    if sample.response_length != wanted:
        raise ValueError(f"a response of {sample.response_length} tokens instead of {wanted}")
    return score(sample.tokens[-sample.response_length :])


def rollout_log(
    rollout_id: int, groups: list[Group], metrics: dict[str, float]
) -> dict[str, float]:
    """Add the seconds in which any request was at the engine: ``perf/generate_time``."""
    del rollout_id
    samples = [sample for group in groups for sample in group]
    start = min(sample.metadata["start_s"] for sample in samples)
    end = max(sample.metadata["end_s"] for sample in samples)
    return {**metrics, "perf/generate_time": end - start}
