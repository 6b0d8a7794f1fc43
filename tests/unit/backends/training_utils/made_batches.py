"""Hand-made micro-batches, token statistics and hooks for the tests of this folder."""

import math
from typing import Any

import torch
from torch import Tensor

from miles.config.algorithm import AlgorithmConfig
from miles.config.hooks import HooksConfig
from miles.config.root import MilesConfig
from miles.contracts.hooks import LossScale
from miles.contracts.types import LossOutput, MicroBatch, TokenStats

NAN = math.nan


def algorithm(**flags: Any) -> MilesConfig:
    return MilesConfig(algorithm=AlgorithmConfig(**flags))


def with_hooks(config: MilesConfig, **paths: str) -> MilesConfig:
    return MilesConfig(algorithm=config.algorithm, hooks=HooksConfig(**paths))


def floats(values: list[float] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float32)


def micro_batch(
    masks: list[list[int]], rewards: list[float] | None = None, **fields: list[float] | None
) -> MicroBatch:
    """One sequence for each mask, with one prompt token before it."""
    lengths = torch.tensor([len(mask) + 1 for mask in masks])
    ends = lengths.cumsum(0)
    num_tokens = int(lengths.sum())
    responses = [torch.arange(int(e) - len(m), int(e)) for e, m in zip(ends, masks, strict=True)]
    index_R = torch.cat(responses) - 1
    tokens = torch.arange(num_tokens) % 7
    return MicroBatch(
        tokens_T=tokens,
        position_ids_T=torch.cat([torch.arange(int(n)) for n in lengths]),
        cu_seqlens_S=torch.cat([torch.zeros(1), ends]).int(),
        max_seqlen=int(lengths.max()),
        logit_index_R=index_R,
        targets_R=tokens[index_R + 1],
        sequence_R=torch.repeat_interleave(torch.arange(len(masks)), lengths - 1),
        loss_mask_R=torch.tensor([x for mask in masks for x in mask], dtype=torch.float32),
        rewards_S=torch.tensor(rewards or [0.0] * len(masks)),
        sample_positions=tuple(range(len(masks))),
        packed=True,
        **{"rollout_log_probs_R": None, **{k: floats(v) for k, v in fields.items()}},
    )


def logs(*probabilities: float) -> list[float]:
    """Log-probs of probabilities (or of ratios)."""
    return [math.log(p) for p in probabilities]


def token_stats(log_probs: list[float], entropy: list[float] | None = None) -> TokenStats:
    """Leaves that require gradient."""
    values = torch.tensor(log_probs, requires_grad=True)
    return TokenStats(
        log_probs_R=values,
        entropy_R=None if entropy is None else torch.tensor(entropy, requires_grad=True),
    )


def gradient(stats: TokenStats) -> list[float]:
    assert stats.log_probs_R.grad is not None
    return stats.log_probs_R.grad.tolist()


def squared_loss(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig
) -> LossOutput:
    """A user's loss: the sum of squared log-probs over the step's tokens."""
    loss = (stats.log_probs_R.square() * batch.loss_mask_R).sum() / scale.num_tokens
    return LossOutput(loss=loss, sums={"squared": loss.detach()})


def mask_from_one(log_ratio_R: Tensor, batch: MicroBatch, config: MilesConfig) -> Tensor:
    """A user's importance weights: the ratio, or 0 where it is 1 or more."""
    weights = log_ratio_R.exp()
    return torch.where(weights >= 1, 0.0, weights)
