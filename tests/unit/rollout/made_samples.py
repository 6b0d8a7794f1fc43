"""Hand-made samples and groups."""

from typing import Any

from miles.contracts.types import Group, Prompt, Sample, Status


def made_sample(
    reward: float | dict[str, Any] | None,
    *,
    response: int = 3,
    prompt: int = 2,
    group_id: int = 0,
    index: int = 0,
    **fields: Any,
) -> Sample:
    """Tokens differ by sample and place; engine log-probs are -0.1, -0.2, ..."""
    tokens = [(3 * index + place) % 11 for place in range(prompt + response)]
    defaults: dict[str, Any] = {
        "tokens": tokens,
        "status": Status.COMPLETED,
        "loss_mask": [1] * response,
        "rollout_log_probs": [-0.1 * (place + 1) for place in range(response)],
        "weight_versions": [1],
    }
    return Sample(
        prompt=Prompt(group_id=group_id, text="", tokens=tuple(tokens[:prompt])),
        index=index,
        response_length=response,
        reward=reward,
        **{**defaults, **fields},
    )


def made_groups(rewards: list[list[float]], responses: list[int] | None = None) -> list[Group]:
    """One group for each list of rewards; the samples' response lengths in order, or 3."""
    lengths = iter(responses or [3] * sum(map(len, rewards)))
    groups: list[Group] = []
    for group_id, group in enumerate(rewards):
        first = sum(map(len, groups))
        groups.append(
            [
                made_sample(r, response=next(lengths), group_id=group_id, index=first + k)
                for k, r in enumerate(group)
            ]
        )
    return groups


def user_rewards(samples: list[Sample], raw_rewards: Any, config: Any) -> Any:
    """A user's ``--custom-reward-post-process-path``."""
    return raw_rewards * 10 + len(samples)


def wrong_rewards(samples: list[Sample], raw_rewards: Any, config: Any) -> Any:
    """One that returns too few."""
    return raw_rewards[:-1]
