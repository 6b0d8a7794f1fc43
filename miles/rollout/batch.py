"""Groups of scored samples to one ``TrainBatch`` for each data-parallel rank.

Rewards are normalised within a prompt's group, samples that must not train get a mask of zeros, and
``split`` says which rank trains what and when. Nothing is dropped: the last optimizer step takes
the remainder and is normalised by its own counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.config.derived import is_supervised, token_budget
from miles.config.root import MilesConfig
from miles.contracts.hooks import load_hook
from miles.contracts.types import Float32, Group, Sample, Status, TrainBatch
from miles.rollout.rewards.score import reward_value
from miles.rollout.split import RankSchedule, split, steps_of

Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One sample as the trainer will see it."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]
    rollout_log_probs: Sequence[float]
    sample: Sample
    reward: float
    raw_reward: float


def make_batches(
    groups: list[Group], config: MilesConfig, rollout_id: int, dp_size: int
) -> list[TrainBatch]:
    """One batch a data-parallel rank; every sample is in exactly one of them.

    A sample that failed is there without its response. Raises ``ValueError`` for a sample that
    cannot be trained on: inconsistent lengths, no prompt token, no reward.
    """
    rows = _rows(groups, config)
    data = config.data
    steps = steps_of(len(rows), data.global_batch_size or max(len(rows), 1))
    schedules = split(
        [len(row.tokens) for row in rows],
        steps,
        dp_size,
        token_budget=token_budget(config),
        micro_batch_size=data.micro_batch_size,
    )
    num_tokens = [sum(row.loss_mask) for row in rows]
    counts = {
        "step_num_samples": tuple(sum(num_tokens[i] > 0 for i in step) for step in steps),
        "step_num_tokens": tuple(sum(num_tokens[i] for i in step) for step in steps),
    }
    supervised = is_supervised(config)
    return [_shard(rows, schedule, rollout_id, supervised, counts) for schedule in schedules]


def raw_reward(sample: Sample, config: MilesConfig) -> float:
    """The number to train on: the reward, or its ``--reward-key`` when it is an object.

    0 for a sample that failed, and for one without reward where the loss uses none. Raises
    ``ValueError`` when there is no finite number.
    """
    value = sample.reward
    if value is None and _needs_no_reward(sample, config):
        return 0.0
    try:
        return reward_value(value, config.reward.reward_key)
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from error


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether two or more rewards are all equal, up to float32 rounding."""
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        return False
    rounding = np.finfo(np.float32).eps * np.abs(values).max()
    return bool(np.ptp(values) <= rounding)


def normalize_group(rewards: Float64, *, divide_by_std: bool) -> Float64:
    """Rewards of one prompt minus their mean, optionally over (unbiased deviation + 1e-6).

    Zeros when all are equal (float32 rounding is no difference). A single sample is its own mean.
    """
    if is_zero_variance(rewards.tolist()):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if not divide_by_std or len(rewards) < 2:
        return centred
    return centred / (rewards.std(ddof=1) + 1e-6)


def batch_metrics(groups: list[Group], config: MilesConfig) -> dict[str, float]:
    """``rollout/...`` metrics of a batch. Rewards: of the samples that have one
    and did not fail."""
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {"rollout/num_samples": 0.0}
    lengths = np.array([sample.response_length for sample in samples])
    scored = [
        [
            raw_reward(sample, config)
            for sample in group
            if sample.status is not Status.FAILED and sample.reward is not None
        ]
        for group in groups
    ]
    rewards = [reward for group in scored for reward in group]
    versions = [version for sample in samples for version in sample.weight_versions]

    def ratio(status: Status) -> float:
        return sum(sample.status is status for sample in samples) / len(samples)

    metrics = {
        "rollout/num_samples": float(len(samples)),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/truncated_ratio": ratio(Status.TRUNCATED),
        "rollout/aborted_ratio": ratio(Status.ABORTED),
        "rollout/failed_ratio": ratio(Status.FAILED),
        "rollout/removed_ratio": sum(s.remove_sample for s in samples) / len(samples),
        "rollout/zero_std_ratio": sum(map(is_zero_variance, scored)) / len(groups),
    }
    if rewards:
        metrics["rollout/raw_reward"] = float(np.mean(rewards))
    if versions:
        metrics["rollout/weight_version/min"] = float(min(versions))
        metrics["rollout/weight_version/max"] = float(max(versions))
    return metrics


def _needs_no_reward(sample: Sample, config: MilesConfig) -> bool:
    return sample.status is Status.FAILED or config.algorithm.loss_type != "policy_loss"


def _normalizer(config: MilesConfig) -> Callable[[Float64], Float64] | None:
    """How a group's rewards are normalised under the advantage estimator; ``None``: not at all."""
    algorithm = config.algorithm
    if not algorithm.rewards_normalization or is_supervised(config):
        return None
    estimator = algorithm.advantage_estimator
    if estimator == "reinforce_plus_plus":
        return None
    divide = estimator in ("grpo", "gspo") and algorithm.grpo_std_normalization
    return lambda rewards: normalize_group(rewards, divide_by_std=divide)


def _normalized_rewards(groups: list[Group], raw: Float64, config: MilesConfig) -> Float32:
    """``[N]``. Samples that failed are no part of their group's statistics, and get 0."""
    path = config.hooks.custom_reward_post_process_path
    replacement = load_hook("custom_reward_post_process_path", path)
    if replacement is not None:
        return _replaced_rewards(replacement, groups, raw, config)
    normalize = _normalizer(config)
    if normalize is None:
        return raw.astype(np.float32)
    rewards = np.zeros_like(raw)
    start = 0
    for group in groups:
        counted = [start + i for i, s in enumerate(group) if s.status is not Status.FAILED]
        if counted:
            rewards[counted] = normalize(raw[counted])
        start += len(group)
    return rewards.astype(np.float32)


def _replaced_rewards(
    function: Callable[..., Any], groups: list[Group], raw: Float64, config: MilesConfig
) -> Float32:
    samples = [sample for group in groups for sample in group]
    rewards = np.asarray(function(samples, raw.astype(np.float32), config), dtype=np.float32)
    if rewards.shape != raw.shape or not np.isfinite(rewards).all():
        raise ValueError(
            "--custom-reward-post-process-path "
            f"{config.hooks.custom_reward_post_process_path}: must return {len(raw)} finite "
            f"numbers, gave an array of shape {rewards.shape}: {rewards}"
        )
    return rewards


def _rows(groups: list[Group], config: MilesConfig) -> list[_Row]:
    samples = [sample for group in groups for sample in group]
    raw = np.array([raw_reward(sample, config) for sample in samples], dtype=np.float64)
    rewards = _normalized_rewards(groups, raw, config)
    return [
        _row(sample, float(reward), float(raw_value))
        for sample, reward, raw_value in zip(samples, rewards, raw, strict=True)
    ]


def _row(sample: Sample, reward: float, raw_reward: float) -> _Row:
    # What a failed sample holds cannot be trusted, not even to be consistent.
    failed = sample.status is Status.FAILED
    if not failed:
        sample.validate()
    tokens = sample.prompt.tokens if failed else sample.tokens
    response_length = 0 if failed else sample.response_length
    if len(tokens) == response_length:
        raise ValueError(
            f"sample {sample.index}: it has no prompt token ({response_length} response tokens); "
            "at least one must come before what is predicted"
        )
    if not set(sample.loss_mask) <= {0, 1}:
        raise ValueError(f"sample {sample.index}: its loss mask holds values other than 0 and 1")
    masked = sample.remove_sample or failed
    return _Row(
        tokens=tokens,
        loss_mask=[0] * response_length if masked else sample.loss_mask,
        rollout_log_probs=sample.rollout_log_probs[:response_length],
        sample=sample,
        reward=reward,
        raw_reward=raw_reward,
    )


def _shard(
    rows: list[_Row],
    schedule: RankSchedule,
    rollout_id: int,
    supervised: bool,
    counts: dict[str, tuple[int, ...]],
) -> TrainBatch:
    chosen = sorted(i for step in schedule for micro_batch in step for i in micro_batch)
    position = {i: k for k, i in enumerate(chosen)}
    mine = [rows[i] for i in chosen]

    return TrainBatch(
        rollout_id=rollout_id,
        tokens_T=_flat([row.tokens for row in mine], np.int32),
        token_offsets=_offsets([len(row.tokens) for row in mine]),
        response_lengths=_frozen(np.array([len(row.loss_mask) for row in mine], np.int32)),
        loss_mask_R=_flat([row.loss_mask for row in mine], np.int32),
        response_offsets=_offsets([len(row.loss_mask) for row in mine]),
        rollout_log_probs_R=(
            None if supervised else _flat([row.rollout_log_probs for row in mine], np.float32)
        ),
        rewards=_frozen(np.array([row.reward for row in mine], np.float32)),
        raw_rewards=_frozen(np.array([row.raw_reward for row in mine], np.float32)),
        sample_indices=_frozen(np.array([row.sample.index for row in mine], np.int64)),
        group_ids=_frozen(np.array([row.sample.group_id for row in mine], np.int64)),
        micro_batches=tuple(
            tuple(tuple(position[i] for i in micro_batch) for micro_batch in step)
            for step in schedule
        ),
        step_num_samples=counts["step_num_samples"],
        step_num_tokens=counts["step_num_tokens"],
    )


def _flat[D: np.generic](parts: list[Sequence[Any]], dtype: type[D]) -> NDArray[D]:
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return _frozen(np.concatenate([np.zeros(0, dtype), *arrays]))


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return _frozen(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))


def _frozen[D: np.generic](array: NDArray[D]) -> NDArray[D]:
    array.flags.writeable = False
    return array
