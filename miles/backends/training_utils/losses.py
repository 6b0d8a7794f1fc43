"""The losses, as pure functions of one micro-batch in a table, and their normalisation.

Every mean is over trainable tokens (``loss_mask_R``) and already divided by the step's global
counts: the mean of the samples' means, or under ``--calculate-per-token-loss`` the mean over all
tokens. So losses and gradients of a step add up over micro-batches and ranks, however it is split.
Masked tokens add exactly 0, whatever their values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from miles.backends.training_utils.kl import approx_kl, bounded_exp, log_ratio
from miles.config.algorithm import AlgorithmConfig
from miles.config.root import MilesConfig
from miles.contracts.hooks import LossScale, load_hook
from miles.contracts.types import LossFn, LossOutput, MicroBatch, TokenStats


def make_loss(config: MilesConfig, scale: LossScale) -> LossFn:
    """The loss of ``--loss-type`` for one optimizer step with these global counts."""
    function = LOSSES[config.algorithm.loss_type]
    return lambda batch, stats: function(batch, stats, scale, config)


def needs_entropy(algorithm: AlgorithmConfig) -> bool:
    """Whether ``TokenStats.entropy_R`` must be computed in optimizer steps."""
    return algorithm.entropy_coef != 0 or algorithm.observe_training_entropy


def policy_loss(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig
) -> LossOutput:
    """Clipped policy gradient with optional corrections, entropy bonus and KL to the reference."""
    algorithm = config.algorithm
    tokens = _policy_tokens(batch, stats, scale, algorithm)
    pg_loss_R, sums = _clipped_objective(batch, tokens, algorithm)
    if algorithm.use_tis:
        weights_R, tis_sums = _engine_corrections(batch, tokens, config)
        pg_loss_R = pg_loss_R * weights_R
        sums |= tis_sums
    loss = tokens.mean(pg_loss_R)
    sums["pg_loss"] = loss
    if stats.entropy_R is not None:
        sums["entropy_loss"] = entropy = tokens.mean(stats.entropy_R)
        if algorithm.entropy_coef != 0:
            loss = loss - algorithm.entropy_coef * entropy
    if batch.ref_log_probs_R is not None:
        sums["kl_loss"] = kl = tokens.mean(_reference_kl(batch.ref_log_probs_R, tokens, algorithm))
        if algorithm.use_kl_loss:
            loss = loss + algorithm.kl_loss_coef * kl
    sums |= _engine_mismatch(tokens)
    return LossOutput(loss=loss, sums=_detached(sums))


def sft_loss(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig
) -> LossOutput:
    """Mean negative log-likelihood."""
    active_R = batch.loss_mask_R > 0
    weights_R = token_weights(batch, scale, config.algorithm)
    loss = -_weighted_sum(stats.log_probs_R, active_R, weights_R)
    sums: dict[str, Tensor] = {}
    if stats.entropy_R is not None:
        sums["entropy_loss"] = _weighted_sum(stats.entropy_R, active_R, weights_R)
    return LossOutput(loss=loss, sums=_detached(sums))


def custom_loss(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig
) -> LossOutput:
    """The user's loss (``--custom-loss-function-path``)."""
    function = _load("custom_loss_function_path", config.hooks.custom_loss_function_path)
    if function is None:
        raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")
    return function(batch, stats, scale, config)


LOSSES: dict[str, Callable[[MicroBatch, TokenStats, LossScale, MilesConfig], LossOutput]] = {
    "policy_loss": policy_loss,
    "sft_loss": sft_loss,
    "custom_loss": custom_loss,
}


def token_weights(batch: MicroBatch, scale: LossScale, algorithm: AlgorithmConfig) -> Tensor:
    """float32 ``[R]``: the weight of each token in the step's mean; 0 where masked.

    Sample mean: 1 / (trainable tokens of the sample * samples of the step that have any); token
    mean: 1 / trainable tokens of the step.
    """
    if algorithm.calculate_per_token_loss:
        return batch.loss_mask_R / max(scale.num_tokens, 1)
    per_sample_R = sequence_sum(batch.loss_mask_R, batch).clamp(min=1)[batch.sequence_R]
    return batch.loss_mask_R / per_sample_R / max(scale.num_samples, 1)


def sequence_sum(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """``[S]``: sum over each sequence's response tokens."""
    sums_S = values_R.new_zeros(batch.num_sequences)
    return sums_S.index_add(0, batch.sequence_R, values_R)


_load = cache(load_hook)


def _weighted_sum(values_R: Tensor, active_R: Tensor, weights_R: Tensor) -> Tensor:
    return (torch.where(active_R, values_R, 0.0) * weights_R).sum()


def _detached(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().float() for name, value in sums.items()}


@dataclass(frozen=True, kw_only=True)
class _PolicyTokens:
    """What the terms of the policy loss share, each ``[R]``; log-probs are 0 where masked."""

    active_R: Tensor
    weights_R: Tensor
    new_R: Tensor
    """With gradient."""
    trainer_R: Tensor
    """Of the weights before the rollout's first step, as the trainer sees them."""
    old_R: Tensor
    """What the ratio is taken against: ``trainer_R`` or the engine's log-probs."""
    engine_R: Tensor | None
    """The engine's, and ``trainer_R`` where it gave none."""
    compared_R: Tensor | None
    """Active tokens for which the engine gave a log-prob."""

    def mean(self, values_R: Tensor) -> Tensor:
        return _weighted_sum(values_R, self.active_R, self.weights_R)


def _policy_tokens(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, algorithm: AlgorithmConfig
) -> _PolicyTokens:
    active_R = batch.loss_mask_R > 0
    new_R = torch.where(active_R, stats.log_probs_R, 0.0)
    trainer_R = new_R.detach()
    if batch.old_log_probs_R is not None:
        trainer_R = torch.where(active_R, batch.old_log_probs_R, 0.0)
    engine_R = compared_R = None
    if batch.rollout_log_probs_R is not None:
        compared_R = active_R & batch.rollout_log_probs_R.isfinite()
        engine_R = torch.where(compared_R, batch.rollout_log_probs_R, trainer_R)
    elif algorithm.use_rollout_logprobs or algorithm.use_tis:
        raise ValueError(
            "--use-rollout-logprobs and --use-tis need samples with the engine's log-probs; "
            "this rollout carries none"
        )
    return _PolicyTokens(
        active_R=active_R,
        weights_R=token_weights(batch, scale, algorithm),
        new_R=new_R,
        trainer_R=trainer_R,
        old_R=(engine_R if algorithm.use_rollout_logprobs and engine_R is not None else trainer_R),
        engine_R=engine_R,
        compared_R=compared_R,
    )


def _clipped_objective(
    batch: MicroBatch, tokens: _PolicyTokens, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective with asymmetric clip (DAPO, arXiv 2503.14476), dual clip (arXiv
    1912.09729), GSPO's sequence ratio (arXiv 2507.18071) and off-policy sequence masking."""
    assert batch.advantages_R is not None, "advantages come before the policy loss"
    advantages_R = torch.where(tokens.active_R, batch.advantages_R, 0.0)
    log_ratio_R = log_ratio(tokens.new_R, tokens.old_R)
    if algorithm.advantage_estimator == "gspo":
        log_ratio_R = _sequence_mean(log_ratio_R, batch)
    ratio_R = bounded_exp(log_ratio_R)
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    unclipped_R = -ratio_R * advantages_R
    clipped_R = -ratio_R.clamp(1 - algorithm.eps_clip, 1 + high) * advantages_R
    loss_R = torch.maximum(unclipped_R, clipped_R)
    if algorithm.eps_clip_c is not None:
        bounded_R = torch.minimum(loss_R, -algorithm.eps_clip_c * advantages_R)
        loss_R = torch.where(advantages_R < 0, bounded_R, loss_R)
    active_ratio_R = torch.where(tokens.active_R, ratio_R.detach(), 0.0)
    sums = {
        "pg_clipfrac": tokens.mean((clipped_R > unclipped_R).float()),
        "ppo_kl": tokens.mean(-log_ratio_R),
        "ois": tokens.mean(ratio_R),
        "ratio_sum": active_ratio_R.sum(),
        "ratio_square_sum": active_ratio_R.square().sum(),
        "active_tokens": tokens.active_R.sum(),
        "invalid_log_ratios": (tokens.new_R - tokens.old_R).isnan().sum(),
    }
    if algorithm.use_opsm:
        drift_R = -_sequence_mean(log_ratio(tokens.new_R.detach(), tokens.old_R), batch)
        dropped_R = (advantages_R < 0) & (drift_R > algorithm.opsm_delta)
        loss_R = torch.where(dropped_R, 0.0, loss_R)
        sums["opsm_clipfrac"] = tokens.mean(dropped_R.float())
    return loss_R, sums


def _sequence_mean(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """``[R]``: each token gets its sequence's mean over trainable tokens (values 0 elsewhere)."""
    counts_S = sequence_sum(batch.loss_mask_R, batch).clamp(min=1)
    return (sequence_sum(values_R, batch) / counts_S)[batch.sequence_R]


def _engine_corrections(
    batch: MicroBatch, tokens: _PolicyTokens, config: MilesConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance weights trainer / engine; exactly 1 where the engine gave nothing."""
    assert tokens.engine_R is not None
    assert tokens.compared_R is not None
    algorithm = config.algorithm
    function = _load("custom_tis_function_path", config.hooks.custom_tis_function_path)
    log_ratio_R = log_ratio(tokens.trainer_R, tokens.engine_R)
    full_R = bounded_exp(log_ratio_R)
    if function is None:
        weights_R = full_R.clamp(algorithm.tis_clip_low, algorithm.tis_clip)
    else:
        weights_R = function(log_ratio_R, batch, config).detach()
    weights_R = torch.where(tokens.compared_R, weights_R, 1.0)
    return weights_R, {
        "tis": tokens.mean(full_R),
        "tis_abs": tokens.mean((full_R - 1).abs()),
        "tis_clipfrac": tokens.mean((weights_R != full_R).float()),
    }


def _reference_kl(
    ref_log_probs_R: Tensor, tokens: _PolicyTokens, algorithm: AlgorithmConfig
) -> Tensor:
    ref_R = torch.where(tokens.active_R, ref_log_probs_R, 0.0)
    kl_R = approx_kl(algorithm.kl_loss_type, tokens.new_R, ref_R)
    if algorithm.use_unbiased_kl:
        kl_R = kl_R * bounded_exp(log_ratio(tokens.new_R, tokens.old_R))
    return kl_R


def _engine_mismatch(tokens: _PolicyTokens) -> dict[str, Tensor]:
    """How far trainer and engine are apart, in sums over the tokens that both scored."""
    if tokens.engine_R is None or tokens.compared_R is None:
        return {}
    difference_R = log_ratio(tokens.trainer_R, tokens.engine_R).abs()
    kl_R = approx_kl("low_var_kl", tokens.engine_R, tokens.trainer_R)
    return {
        "train_rollout_logprob_abs_diff": difference_R.sum(),
        "train_rollout_kl": kl_R.sum(),
        "compared_tokens": tokens.compared_R.sum(),
        "invalid_rollout_log_probs": (tokens.active_R & ~tokens.compared_R).sum(),
    }
