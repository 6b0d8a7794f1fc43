"""What is optimized."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm: what is optimized."""

    loss_type: Annotated[
        Literal["policy_loss", "sft_loss", "custom_loss"], Doc("What the trainer minimizes.")
    ] = "policy_loss"
    advantage_estimator: Annotated[
        Literal["grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
        Doc("How rewards become advantages."),
    ] = "grpo"
    grpo_std_normalization: Annotated[
        bool,
        Doc("Divide group advantages by the group's deviation."),
        Flag(name="--disable-grpo-std-normalization"),
    ] = True
    rewards_normalization: Annotated[
        bool,
        Doc("Subtract the group's mean reward."),
        Flag(name="--disable-rewards-normalization"),
    ] = True
    normalize_advantages: Annotated[
        bool, Doc("Whiten advantages over all trainable tokens of the rollout.")
    ] = False
    gamma: Annotated[float, Doc("Discount of REINFORCE++ returns.")] = 1.0
    eps_clip: Annotated[float, Doc("Lower clip of the ratio.")] = 0.2
    eps_clip_high: Annotated[
        float | None, Doc("Upper clip of the ratio; by default --eps-clip.")
    ] = None
    eps_clip_c: Annotated[
        float | None, Doc("Dual clip: bound of the loss at negative advantages (> 1).")
    ] = None
    calculate_per_token_loss: Annotated[
        bool,
        Doc("Mean over all tokens of a step instead of the mean of the samples' means."),
        Flag(shared=True),
    ] = False
    entropy_coef: Annotated[float, Doc("Entropy bonus.")] = 0.0
    observe_training_entropy: Annotated[bool, Doc("Log the entropy without training on it.")] = (
        False
    )
    kl_coef: Annotated[float, Doc("KL to the reference in the reward.")] = 0.0
    use_kl_loss: Annotated[
        bool, Doc("Add KL to the reference to the loss; without a coefficient it is only measured.")
    ] = False
    kl_loss_coef: Annotated[float, Doc("Coefficient of the KL loss.")] = 0.0
    kl_loss_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"], Doc("KL estimator, in loss and reward.")
    ] = "k1"
    use_unbiased_kl: Annotated[bool, Doc("Weight the KL loss by the policy ratio.")] = False
    ref_load: Annotated[
        str | None,
        Doc(
            "Hugging Face directory of the reference; by default --hf-checkpoint. Megatron: also "
            "the parent of a torch_dist checkpoint, whose weights the policy starts from too."
        ),
    ] = None
    ref_update_interval: Annotated[
        int | None, Doc("Copy the policy into the reference every so many rollouts.")
    ] = None
    use_rollout_logprobs: Annotated[
        bool, Doc("Take the engine's log-probs as the old policy's.")
    ] = False
    use_tis: Annotated[bool, Doc("Truncated importance sampling between trainer and engine.")] = (
        False
    )
    tis_clip: Annotated[float, Doc("Upper clip of the weights of --use-tis.")] = 2.0
    tis_clip_low: Annotated[float, Doc("Lower clip of the weights of --use-tis.")] = 0.0
    use_opsm: Annotated[bool, Doc("Mask negative samples that drifted off policy.")] = False
    opsm_delta: Annotated[float, Doc("Drift bound of --use-opsm.")] = 1e-4
    log_probs_chunk_size: Annotated[
        int, Doc("Tokens whose fp32 logits exist at a time; -1 chooses by the vocabulary.")
    ] = -1
    reset_optimizer_states: Annotated[
        bool, Doc("Clear the optimizer's moments before every rollout.")
    ] = False
    seed: Annotated[int, Doc("Seed of the trainer."), Flag(shared=True)] = 1234
