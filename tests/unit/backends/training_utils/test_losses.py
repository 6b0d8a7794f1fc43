import math

import pytest
import torch

from miles.backends.training_utils.losses import LOSSES, make_loss, needs_entropy
from miles.config.algorithm import AlgorithmConfig
from miles.config.root import MilesConfig
from miles.contracts.hooks import LossScale
from miles.contracts.types import LossOutput, MicroBatch, TokenStats
from tests.unit.backends.training_utils.made_batches import (
    NAN,
    algorithm,
    gradient,
    logs,
    micro_batch,
    token_stats,
    with_hooks,
)

HERE = "tests.unit.backends.training_utils.made_batches"


def run(
    config: MilesConfig, batch: MicroBatch, stats: TokenStats, samples: int = 1, tokens: int = 0
) -> LossOutput:
    output = make_loss(config, LossScale(num_samples=samples, num_tokens=tokens))(batch, stats)
    output.loss.backward()
    return output


def test_clipped_objective_at_a_positive_advantage() -> None:
    # Ratios 1.5 and 0.6, A = 2: max(-3, -2.4) and max(-1.2, -1.6).
    stats = token_stats(logs(0.75, 0.3))
    batch = micro_batch([[1, 1]], old_log_probs_R=logs(0.5, 0.5), advantages_R=[2.0, 2.0])
    output = run(algorithm(), batch, stats)
    assert output.loss.item() == pytest.approx((-2.4 - 1.2) / 2)
    assert gradient(stats) == pytest.approx([0.0, -0.6])
    assert output.sums["pg_clipfrac"].item() == pytest.approx(0.5)
    assert output.sums["ppo_kl"].item() == pytest.approx(-math.log(1.5 * 0.6) / 2)
    assert output.sums["ois"].item() == pytest.approx(1.05)


def test_clipped_objective_at_a_negative_advantage() -> None:
    # Ratios 1.5 and 0.6, A = -1: max(1.5, 1.2) and max(0.6, 0.8).
    stats = token_stats(logs(0.75, 0.3))
    batch = micro_batch([[1, 1]], old_log_probs_R=logs(0.5, 0.5), advantages_R=[-1.0, -1.0])
    assert run(algorithm(), batch, stats).loss.item() == pytest.approx((1.5 + 0.8) / 2)
    assert gradient(stats) == pytest.approx([0.75, 0.0])


def test_the_upper_clip_can_be_higher() -> None:
    stats = token_stats(logs(0.75))
    batch = micro_batch([[1]], old_log_probs_R=logs(0.5), advantages_R=[1.0])
    assert run(algorithm(eps_clip_high=0.28), batch, stats).loss.item() == pytest.approx(-1.28)


def test_dual_clip_bounds_the_loss_at_a_negative_advantage() -> None:
    # Ratio 10, A = -1: 10 without, 3 with the bound 3. A positive advantage is untouched.
    old, new = logs(0.05, 0.05), logs(0.5, 0.5)
    batch = micro_batch([[1, 1]], old_log_probs_R=old, advantages_R=[-1.0, 1.0])
    assert run(algorithm(), batch, token_stats(new)).loss.item() == pytest.approx((10 - 1.2) / 2)
    stats = token_stats(new)
    bounded = run(algorithm(eps_clip_c=3.0), batch, stats)
    assert bounded.loss.item() == pytest.approx((3 - 1.2) / 2)
    assert gradient(stats) == [0.0, 0.0]


def test_gspo_uses_the_sequence_mean_of_trainable_log_ratios() -> None:
    # Log ratios 0.2 and 0 (and a masked 5): the ratio of the sequence is e^0.1.
    stats = token_stats([-1.0, -2.0, -1.0])
    batch = micro_batch([[1, 1, 0]], old_log_probs_R=[-1.2, -2.0, -6.0], advantages_R=[1.0] * 3)
    output = run(algorithm(advantage_estimator="gspo"), batch, stats)
    assert output.loss.item() == pytest.approx(-math.exp(0.1), rel=1e-6)
    assert gradient(stats) == pytest.approx([-math.exp(0.1) / 2, -math.exp(0.1) / 2, 0.0])


def test_gspo_clips_whole_sequences() -> None:
    stats = token_stats([-1.0, -1.0, -1.0])
    batch = micro_batch(
        [[1, 1], [1]], old_log_probs_R=[-2.0, -1.0, -1.1], advantages_R=[1.0, 1.0, 1.0]
    )
    output = run(algorithm(advantage_estimator="gspo"), batch, stats, samples=2)
    assert output.loss.item() == pytest.approx(-(1.2 + math.exp(0.1)) / 2)
    assert output.sums["pg_clipfrac"].item() == pytest.approx(0.5)


def test_first_step_has_ratio_exactly_one() -> None:
    stats = token_stats([-1.37, -0.011])
    batch = micro_batch([[1, 1]], advantages_R=[0.5, 0.5])
    output = run(algorithm(), batch, stats)
    assert output.loss.item() == -0.5
    assert gradient(stats) == [-0.25, -0.25]
    assert output.sums["ppo_kl"].item() == 0
    assert output.sums["pg_clipfrac"].item() == 0


def test_sample_mean_and_token_mean_weigh_tokens_differently() -> None:
    batch = micro_batch([[1], [1, 1, 1]], advantages_R=[1.0, -2.0, -2.0, -2.0])
    stats = token_stats([-1.0] * 4)
    assert run(algorithm(), batch, stats, samples=2, tokens=4).loss.item() == pytest.approx(0.5)
    assert gradient(stats) == pytest.approx([-1 / 2, 2 / 6, 2 / 6, 2 / 6])
    stats = token_stats([-1.0] * 4)
    config = algorithm(calculate_per_token_loss=True)
    assert run(config, batch, stats, samples=2, tokens=4).loss.item() == pytest.approx(1.25)
    assert gradient(stats) == pytest.approx([-1 / 4, 2 / 4, 2 / 4, 2 / 4])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_a_sample_whose_mask_is_all_zero_adds_nothing(per_token: bool, loss_type: str) -> None:
    config = algorithm(calculate_per_token_loss=per_token, loss_type=loss_type)
    alone = run(
        config, micro_batch([[1, 1]], advantages_R=[1.0, 1.0]), token_stats([-1.0, -2.0]), 1, 2
    )
    stats = token_stats([-1.0, -2.0, -3.0])
    batch = micro_batch([[1, 1], [0]], advantages_R=[1.0, 1.0, 10.0])
    assert run(config, batch, stats, 1, 2).loss.item() == alone.loss.item()
    assert gradient(stats)[2] == 0
    empty = run(config, micro_batch([[0]], advantages_R=[1.0]), token_stats([-1.0]), 0, 0)
    assert empty.loss.item() == 0


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_masked_tokens_add_exactly_zero_even_when_everything_about_them_is_nan(
    loss_type: str,
) -> None:
    config = algorithm(
        loss_type=loss_type, entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5, use_tis=True
    )
    fields = {"old_log_probs_R": [-1.1], "ref_log_probs_R": [-1.3], "rollout_log_probs_R": [-1.2]}
    clean_stats = token_stats([-1.0], [0.7])
    clean = run(config, micro_batch([[1]], advantages_R=[1.0], **fields), clean_stats)
    stats = token_stats([-1.0, NAN], [0.7, NAN])
    poisoned = {name: [*values, NAN] for name, values in fields.items()}
    output = run(config, micro_batch([[1, 0]], advantages_R=[1.0, NAN], **poisoned), stats)
    assert output.loss.item() == clean.loss.item()
    assert gradient(stats) == [*gradient(clean_stats), 0.0]
    assert {k: v.item() for k, v in output.sums.items()} == {
        k: v.item() for k, v in clean.sums.items()
    }


@pytest.mark.parametrize("value", [1e4, -1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
@pytest.mark.parametrize("where", ["new", "old", "ref", "engine"])
def test_wild_log_ratios_give_a_finite_loss_and_gradient(
    value: float, advantage: float, estimator: str, where: str
) -> None:
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        config = algorithm(
            advantage_estimator=estimator,
            use_kl_loss=True,
            kl_loss_coef=0.1,
            kl_loss_type=kind,
            use_unbiased_kl=True,
            use_tis=True,
            use_opsm=True,
        )
        wild = [value, -1.0]
        stats = token_stats(wild if where == "new" else [-1.0, -1.0])
        batch = micro_batch(
            [[1, 1]],
            advantages_R=[advantage] * 2,
            old_log_probs_R=wild if where == "old" else [-1.5, -1.0],
            ref_log_probs_R=wild if where == "ref" else [-1.5, -1.0],
            rollout_log_probs_R=wild if where == "engine" else [-1.5, -1.0],
        )
        output = run(config, batch, stats)
        assert output.loss.isfinite()
        assert all(math.isfinite(g) for g in gradient(stats))
        assert all(value.isfinite() for value in output.sums.values())


def test_a_missing_engine_log_prob_gives_weight_one_and_is_counted() -> None:
    # Weights 1.5 (old 0.6, engine 0.4), and 1 where the engine gave nothing.
    batch = micro_batch(
        [[1, 1, 1]],
        old_log_probs_R=logs(0.6, 0.6, 0.6),
        rollout_log_probs_R=[math.log(0.4), NAN, -math.inf],
        advantages_R=[1.0] * 3,
    )
    output = run(algorithm(use_tis=True), batch, token_stats(logs(0.6, 0.6, 0.6)))
    assert output.loss.item() == pytest.approx(-(1.5 + 1 + 1) / 3)
    assert output.sums["invalid_rollout_log_probs"].item() == 2
    assert output.sums["compared_tokens"].item() == 1
    assert output.sums["train_rollout_logprob_abs_diff"].item() == pytest.approx(math.log(1.5))


def test_engine_log_probs_can_be_the_old_policy() -> None:
    # Ratio 0.55 / 0.5; where the engine gave nothing the ratio is exactly 1, also in later steps.
    batch = micro_batch([[1, 1]], rollout_log_probs_R=[math.log(0.5), NAN], advantages_R=[1.0, 1.0])
    stats = token_stats(logs(0.55, 0.3))
    output = run(algorithm(use_rollout_logprobs=True), batch, stats)
    assert output.loss.item() == pytest.approx(-(1.1 + 1) / 2)
    assert gradient(stats) == pytest.approx([-1.1 / 2, -1 / 2])
    assert output.sums["invalid_rollout_log_probs"].item() == 1


def test_importance_weights_are_truncated_on_both_sides() -> None:
    # Trainer over engine: 3 -> 2, 0.5 stays, 0.1 -> 0.25.
    batch = micro_batch(
        [[1, 1, 1]],
        old_log_probs_R=logs(0.3, 0.3, 0.05),
        rollout_log_probs_R=logs(0.1, 0.6, 0.5),
        advantages_R=[1.0] * 3,
    )
    config = algorithm(use_tis=True, tis_clip=2.0, tis_clip_low=0.25)
    stats = token_stats(logs(0.3, 0.3, 0.05))
    output = run(config, batch, stats)
    assert output.loss.item() == pytest.approx(-(2 + 0.5 + 0.25) / 3)
    assert gradient(stats) == pytest.approx([-2 / 3, -0.5 / 3, -0.25 / 3])
    assert output.sums["tis"].item() == pytest.approx((3 + 0.5 + 0.1) / 3)
    assert output.sums["tis_abs"].item() == pytest.approx((2 + 0.5 + 0.9) / 3)
    assert output.sums["tis_clipfrac"].item() == pytest.approx(2 / 3)


def test_importance_weights_can_be_the_users() -> None:
    batch = micro_batch(
        [[1, 1, 1]],
        old_log_probs_R=logs(0.3, 0.3, 0.3),
        rollout_log_probs_R=[*logs(0.1, 0.6), NAN],
        advantages_R=[1.0] * 3,
    )
    config = with_hooks(algorithm(use_tis=True), custom_tis_function_path=f"{HERE}.mask_from_one")
    output = run(config, batch, token_stats(logs(0.3, 0.3, 0.3)))
    assert output.loss.item() == pytest.approx(-(0 + 0.5 + 1) / 3)


def test_without_engine_log_probs_a_correction_is_refused() -> None:
    batch = micro_batch([[1]], advantages_R=[1.0])
    with pytest.raises(ValueError, match="--use-tis"):
        run(algorithm(use_tis=True), batch, token_stats([-1.0]))


def test_opsm_masks_negative_sequences_that_drifted() -> None:
    # Sequence means of old - new: 0.5, 0.5, 0.05. Only the first is negative and above 0.1.
    batch = micro_batch(
        [[1, 1], [1], [1]],
        old_log_probs_R=[-1.0, -1.0, -1.0, -1.0],
        advantages_R=[-1.0, -1.0, 1.0, -1.0],
    )
    stats = token_stats([-1.2, -1.8, -1.5, -1.05])
    output = run(algorithm(use_opsm=True, opsm_delta=0.1), batch, stats, samples=3)
    assert output.loss.item() == pytest.approx((0 - math.exp(-0.5) + math.exp(-0.05)) / 3)
    assert gradient(stats)[:2] == [0.0, 0.0]
    assert output.sums["opsm_clipfrac"].item() == pytest.approx(1 / 3)


def test_entropy_bonus_lowers_the_loss() -> None:
    batch = micro_batch([[1, 1]], advantages_R=[0.0, 0.0])
    stats = token_stats([-1.0, -1.0], entropy=[2.0, 1.0])
    output = run(algorithm(entropy_coef=0.1), batch, stats)
    assert output.loss.item() == pytest.approx(-0.15)
    assert output.sums["entropy_loss"].item() == pytest.approx(1.5)
    assert output.sums["pg_loss"].item() == 0
    assert stats.entropy_R is not None
    assert stats.entropy_R.grad is not None
    assert stats.entropy_R.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_an_observed_entropy_is_not_trained() -> None:
    batch = micro_batch([[1]], advantages_R=[1.0])
    stats = token_stats([-1.0], entropy=[2.0])
    config = algorithm(observe_training_entropy=True)
    output = run(config, batch, stats)
    assert output.sums["entropy_loss"].item() == 2
    assert output.loss.item() == -1
    assert stats.entropy_R is not None
    assert stats.entropy_R.grad is None
    assert needs_entropy(config.algorithm)
    assert needs_entropy(AlgorithmConfig(entropy_coef=0.1))
    assert not needs_entropy(AlgorithmConfig())


def test_kl_loss_is_added_with_its_coefficient() -> None:
    # k1 of 0.6 against 0.3 is ln 2; unbiased: times the ratio 0.6 / 0.5.
    batch = micro_batch(
        [[1]], old_log_probs_R=logs(0.5), ref_log_probs_R=logs(0.3), advantages_R=[0.0]
    )
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    stats = token_stats(logs(0.6))
    output = run(algorithm(**flags), batch, stats)
    assert output.loss.item() == pytest.approx(0.1 * math.log(2))
    assert output.sums["kl_loss"].item() == pytest.approx(math.log(2))
    assert gradient(stats) == pytest.approx([0.1])
    stats = token_stats(logs(0.6))
    unbiased = run(algorithm(**flags, use_unbiased_kl=True), batch, stats)
    assert unbiased.loss.item() == pytest.approx(0.12 * math.log(2))
    # d/dx ratio * k = ratio * (k + 1).
    assert gradient(stats) == pytest.approx([0.12 * (math.log(2) + 1)])


def test_trainer_engine_mismatch_is_always_measured() -> None:
    # |ln(0.6 / 0.5)| and |ln(0.2 / 0.4)|; low-variance KL of engine against trainer.
    batch = micro_batch(
        [[1, 1, 0]], rollout_log_probs_R=logs(0.5, 0.4, 0.9), advantages_R=[1.0] * 3
    )
    sums = run(algorithm(), batch, token_stats(logs(0.6, 0.2, 0.1))).sums
    differences = [math.log(0.6 / 0.5), math.log(0.4 / 0.2)]
    assert sums["train_rollout_logprob_abs_diff"].item() == pytest.approx(sum(differences))
    kl = (0.6 / 0.5 - 1 + math.log(0.5 / 0.6)) + (0.2 / 0.4 - 1 + math.log(0.4 / 0.2))
    assert sums["train_rollout_kl"].item() == pytest.approx(kl, rel=1e-4)
    assert sums["compared_tokens"].item() == 2


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    stats = token_stats([-1.0, -2.0, -5.0, -4.0])
    batch = micro_batch([[1, 1, 0], [1]])
    output = run(algorithm(loss_type="sft_loss"), batch, stats, samples=2)
    assert output.loss.item() == pytest.approx((1.5 + 4) / 2)
    assert gradient(stats) == pytest.approx([-0.25, -0.25, 0.0, -0.5])


def test_the_loss_can_be_the_users() -> None:
    config = with_hooks(
        algorithm(loss_type="custom_loss"), custom_loss_function_path=f"{HERE}.squared_loss"
    )
    output = run(config, micro_batch([[1, 0]]), token_stats([-3.0, -1.0]), tokens=2)
    assert output.loss.item() == 4.5
    with pytest.raises(ValueError, match="--custom-loss-function-path"):
        run(algorithm(loss_type="custom_loss"), micro_batch([[1]]), token_stats([-1.0]))


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_an_empty_micro_batch_has_zero_loss_with_gradient(loss_type: str) -> None:
    batch = micro_batch([[]], rollout_log_probs_R=[], advantages_R=[])
    stats = token_stats([], entropy=[])
    config = algorithm(loss_type=loss_type, entropy_coef=0.1, use_opsm=True)
    output = run(config, batch, stats, samples=3, tokens=9)
    assert output.loss.item() == 0
    assert all(value.item() == 0 for value in output.sums.values())
    assert gradient(stats) == []


def test_sums_are_detached_float32_scalars() -> None:
    batch = micro_batch(
        [[1]], rollout_log_probs_R=[-1.0], ref_log_probs_R=[-1.0], advantages_R=[1.0]
    )
    config = algorithm(use_tis=True, use_opsm=True, entropy_coef=0.1, use_kl_loss=True)
    output = run(config, batch, token_stats([-1.0], entropy=[1.0]))
    for value in output.sums.values():
        assert value.dtype == torch.float32
        assert value.shape == ()
        assert not value.requires_grad


def test_every_loss_type_is_in_the_table() -> None:
    assert set(LOSSES) == {"policy_loss", "sft_loss", "custom_loss"}
