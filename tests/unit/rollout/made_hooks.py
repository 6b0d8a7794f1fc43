"""User functions of the rollout tests, as a user's module would hold them."""

from miles.config.root import MilesConfig
from miles.contracts.hooks import FilterDecision, GenerateContext
from miles.contracts.types import Group, Prompt, Sample
from miles.rollout.generate import extend_samples, is_open, start_samples

seen_groups: list[Group] = []


def reward_of_length(sample: Sample, config: MilesConfig) -> float:
    return float(sample.response_length + sample.index % 2)


def drop_long(group: Group, config: MilesConfig) -> FilterDecision:
    return FilterDecision(group[0].response_length < 4, "long")


def drop_all(group: Group, config: MilesConfig) -> bool:
    return False


def last_first(buffer: list[Group], num_groups: int) -> list[Group]:
    return buffer[::-1][:num_groups]


def remove_odd(groups: list[Group], config: MilesConfig) -> None:
    for group in groups:
        group[1].remove_sample = True


def see_all(groups: list[Group], config: MilesConfig) -> None:
    seen_groups[:] = groups


async def many_calls(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Prompts but the first two call their engine until they are aborted."""
    samples = start_samples(prompt, context)
    for _ in range(1000 if prompt.group_id > 1 else 1):
        for sample in samples:
            del sample.tokens[len(prompt.tokens) :]
            sample.response_length = 0
            sample.loss_mask, sample.rollout_log_probs = [], []
        await extend_samples(samples, context)
        if is_open(samples[0]):
            break
    return samples


down: set[int] = set()
"""Indices of samples whose judge does not answer."""


def reward_unless_down(sample: Sample, config: MilesConfig) -> float:
    if sample.index in down:
        raise ConnectionError("the judge is down")
    return 1.0
