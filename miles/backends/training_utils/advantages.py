"""Advantage estimators, by name in a table, and whitening over data-parallel ranks.

They start from the group-normalised reward of each sample. Masked tokens get advantage 0, and a
sample without a trainable token gives none to anyone else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles.backends.training_utils.kl import approx_kl
from miles.backends.training_utils.packing import with_fields
from miles.config.algorithm import AlgorithmConfig
from miles.config.root import MilesConfig
from miles.contracts.parallel import ParallelState
from miles.contracts.types import MicroBatch
from miles.core import device


def compute_advantages(
    batches: Sequence[MicroBatch], config: MilesConfig, parallel: ParallelState
) -> list[MicroBatch]:
    """Fill ``advantages_R`` of a rollout's micro-batches. Collective over data-parallel ranks.

    With ``--kl-coef`` every batch needs ``ref_log_probs_R`` and the policy's log-probs: those of
    the engine under ``--use-rollout-logprobs``, else ``old_log_probs_R``.
    """
    algorithm = config.algorithm
    estimate = ESTIMATORS[algorithm.advantage_estimator]
    advantages = [
        estimate(batch, _reward_kl(batch, algorithm), algorithm) * batch.loss_mask_R
        for batch in batches
    ]
    if algorithm.normalize_advantages:
        advantages = whiten(advantages, [batch.loss_mask_R for batch in batches], parallel)
    return [
        with_fields(batch, advantages_R=advantages_R)
        for batch, advantages_R in zip(batches, advantages, strict=True)
    ]


def spread_reward(batch: MicroBatch, kl_R: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """GRPO, GSPO and REINFORCE++ with baseline: A_t = R - kl_coef * KL_t at every token."""
    return batch.rewards_S[batch.sequence_R] - algorithm.kl_coef * kl_R


def discounted_returns(batch: MicroBatch, kl_R: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): G_t = r_t + gamma * G_{t+1}, with r_t = -kl_coef * KL_t and
    the sample's reward added at its last trainable token; t counts masked tokens too."""
    rewards_R = -algorithm.kl_coef * kl_R
    last_S, trainable_S = _last_trainable(batch)
    rewards_R = rewards_R.index_add(0, last_S, batch.rewards_S[trainable_S])
    # A grid with a row for each sequence, zeros behind its end.
    column_R = _place_in_response(batch)
    num_columns = int(column_R.max()) + 1 if len(column_R) else 0
    grid_SxL = rewards_R.new_zeros(batch.num_sequences, num_columns)
    grid_SxL[batch.sequence_R, column_R] = rewards_R
    return _discounted_sums(grid_SxL, algorithm.gamma)[batch.sequence_R, column_R]


ESTIMATORS: dict[str, Callable[[MicroBatch, Tensor, AlgorithmConfig], Tensor]] = {
    "grpo": spread_reward,
    "gspo": spread_reward,
    "reinforce_plus_plus": discounted_returns,
    "reinforce_plus_plus_baseline": spread_reward,
}
"""``(batch, KL to the reference [R] (0 where masked), flags) -> [R]``."""


def whiten(
    advantages: Sequence[Tensor], masks: Sequence[Tensor], parallel: ParallelState
) -> list[Tensor]:
    """(A - mean) / sqrt(variance + 1e-8) over the trainable tokens of all ranks; 0 where masked.

    The variance is unbiased. Collective: two sums, also on a rank without tokens.
    """
    active = [mask_R > 0 for mask_R in masks]
    values = [a[m].double() for a, m in zip(advantages, active, strict=True)]
    flat = torch.cat(values) if values else torch.zeros(0, device=device.current_device())
    flat = flat.double()
    total, count = parallel.dp_sum(torch.stack([flat.sum(), flat.new_tensor(len(flat))]))
    mean = total / count.clamp(min=1)
    squares = parallel.dp_sum((flat - mean).square().sum())
    scale = (squares / (count - 1).clamp(min=1) + 1e-8).rsqrt()
    return [
        torch.where(m, (a.double() - mean) * scale, 0.0).to(a.dtype)
        for a, m in zip(advantages, active, strict=True)
    ]


def _reward_kl(batch: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    if algorithm.kl_coef == 0:
        return torch.zeros_like(batch.loss_mask_R)
    policy_R = (
        batch.rollout_log_probs_R if algorithm.use_rollout_logprobs else batch.old_log_probs_R
    )
    assert policy_R is not None, "--kl-coef needs the policy's log-probs"
    assert batch.ref_log_probs_R is not None, "--kl-coef needs the reference's log-probs"
    kl_R = approx_kl(algorithm.kl_loss_type, policy_R, batch.ref_log_probs_R)
    return torch.where(batch.loss_mask_R > 0, kl_R, 0.0)


def _place_in_response(batch: MicroBatch) -> Tensor:
    """int64 ``[R]``: 0, 1, ... within each sequence's response."""
    counts_S = torch.bincount(batch.sequence_R, minlength=batch.num_sequences)
    starts_S = counts_S.cumsum(0) - counts_S
    return torch.arange(len(batch.sequence_R), device=starts_S.device) - starts_S[batch.sequence_R]


def _last_trainable(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Index into ``R`` of the last trainable token of the sequences that have one, and which
    sequences those are."""
    places_R = torch.arange(len(batch.sequence_R), device=batch.sequence_R.device)
    places_R = torch.where(batch.loss_mask_R > 0, places_R, -1)
    last_S = places_R.new_full((batch.num_sequences,), -1)
    last_S = last_S.scatter_reduce(0, batch.sequence_R, places_R, "amax")
    trainable_S = last_S >= 0
    return last_S[trainable_S], trainable_S


def _discounted_sums(rewards_SxL: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} along the rows, in log2(L) steps: after the step of width k each
    entry holds the discounted sum of the next 2k rewards."""
    sums_SxL = rewards_SxL
    width = 1
    while width < sums_SxL.shape[1]:
        ahead = torch.nn.functional.pad(sums_SxL[:, width:], (0, width))
        sums_SxL = sums_SxL + gamma**width * ahead
        width *= 2
    return sums_SxL
