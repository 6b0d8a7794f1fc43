"""Flags that mean something only together with others: given without them, they are refused.

A flag that would be ignored is a wish that silently fails, so it is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass

from miles.config.derived import evaluates, is_supervised, needs_engines, needs_reference
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem


@dataclass(frozen=True)
class Applies:
    """These flags have an effect only when the condition holds."""

    dests: tuple[str, ...]
    condition: Callable[[MilesConfig], bool]
    to: str
    """Completes "applies only ..."."""


APPLIES: tuple[Applies, ...] = (
    # Data and batches.
    Applies(
        ("prompt_data_kwargs",),
        lambda c: (c.data.prompt_data or "").startswith("reasoning_gym:"),
        "to --prompt-data reasoning_gym:FAMILY",
    ),
    Applies(
        ("apply_chat_template_kwargs", "chat_template_path"),
        lambda c: c.data.apply_chat_template or is_supervised(c) or _has_own_generate(c),
        "with --apply-chat-template, in supervised training or with a custom generate function",
    ),
    Applies(
        ("loss_mask_type",),
        is_supervised,
        "with --loss-type sft_loss",
    ),
    Applies(
        ("max_tokens_per_gpu",),
        lambda c: c.data.use_dynamic_batch_size,
        "with --use-dynamic-batch-size",
    ),
    Applies(
        ("micro_batch_size",),
        lambda c: not c.data.use_dynamic_batch_size,
        "without --use-dynamic-batch-size, which packs up to --max-tokens-per-gpu",
    ),
    Applies(
        ("reward_key", "eval_reward_key"),
        lambda c: (
            c.hooks.custom_rm_path is not None
            or c.reward.rm_url is not None
            or _has_own_generate(c)
        ),
        "to rewards that are objects: with --custom-rm-path, --rm-url or a generate function",
    ),
    # Rollout.
    Applies(
        ("offload_rollout_level",),
        lambda c: bool(c.offload.offload_rollout),
        "with --offload-rollout, which --colocate turns on",
    ),
    Applies(
        ("offload_train_target", "rematerialize_param_from_master_weight"),
        lambda c: bool(c.offload.offload_train),
        "with --offload-train, which --colocate turns on",
    ),
    Applies(
        (
            "offload_train_disk_dir",
            "offload_train_disk_chunk_mb",
            "stream_optimizer_state_to_disk",
        ),
        lambda c: bool(c.offload.offload_train) and c.offload.offload_train_target == "disk",
        "with --offload-train and --offload-train-target disk",
    ),
    Applies(
        ("stream_optimizer_state_moment_dtype",),
        lambda c: c.offload.stream_optimizer_state_to_disk,
        "with --stream-optimizer-state-to-disk",
    ),
    Applies(
        ("check_rematerialize_param_from_master_weight",),
        lambda c: c.offload.rematerialize_param_from_master_weight,
        "with --rematerialize-param-from-master-weight",
    ),
    Applies(
        ("convert_optimizer_state",),
        lambda c: c.checkpoint.load is not None,
        "with --load",
    ),
    Applies(
        ("partial_rollout",),
        lambda c: _aborts_surplus(c),
        "where responses are aborted: with --over-sampling-batch-size above --rollout-batch-size, "
        "--dynamic-sampling-filter-path or --rollout-function-path",
    ),
    Applies(
        ("mask_offpolicy_in_partial_rollout", "buffer_filter_path"),
        lambda c: c.rollout.partial_rollout,
        "with --partial-rollout",
    ),
    Applies(
        (
            "generate_max_turns",
            "generate_tool_timeout_s",
            "generate_tool_specs_path",
            "generate_execute_tool_function_path",
        ),
        lambda c: _has_own_generate(c),
        "with --custom-generate-function-path miles.rollout.multi_turn.generate (or your own)",
    ),
    Applies(
        (
            "rollout_health_check_interval",
            "rollout_health_check_timeout",
            "rollout_health_check_first_wait",
        ),
        lambda c: c.rollout.use_fault_tolerance,
        "without --no-use-fault-tolerance",
    ),
    Applies(
        ("rollout_health_check_timeout", "rollout_health_check_first_wait"),
        lambda c: c.rollout.rollout_health_check_interval > 0,
        "with a --rollout-health-check-interval above 0",
    ),
    Applies(
        ("rollout_external_engine_addrs",),
        lambda c: c.rollout.rollout_external,
        "with --rollout-external",
    ),
    Applies(
        (
            "rollout_num_gpus",
            "sglang_max_running_requests",
            "sglang_max_total_tokens",
            "sglang_mem_fraction_static",
            "sglang_log_level",
            "rollout_engine_start_timeout_s",
        ),
        lambda c: not c.rollout.rollout_external,
        "to engines that Miles starts; those of --rollout-external were launched with their own",
    ),
    # Reward.
    Applies(
        ("rm_url",),
        # Whether a row of a file names it is asked where the rows are read.
        lambda c: (c.reward.rm_type or "").endswith("remote_rm") or _rows_may_name_rewards(c),
        "with --rm-type remote_rm, or to rows whose metadata.rm_type is remote_rm",
    ),
    # Algorithm.
    Applies(
        ("grpo_std_normalization",),
        lambda c: c.algorithm.advantage_estimator in ("grpo", "gspo"),
        "to --advantage-estimator grpo and gspo",
    ),
    Applies(
        ("rewards_normalization",),
        lambda c: c.algorithm.advantage_estimator != "reinforce_plus_plus",
        "to --advantage-estimator grpo, gspo and reinforce_plus_plus_baseline",
    ),
    Applies(
        ("gamma",),
        lambda c: c.algorithm.advantage_estimator == "reinforce_plus_plus",
        "to --advantage-estimator reinforce_plus_plus",
    ),
    Applies(
        ("kl_loss_coef", "use_unbiased_kl"),
        lambda c: c.algorithm.use_kl_loss,
        "with --use-kl-loss",
    ),
    Applies(
        ("kl_loss_type", "ref_update_interval"),
        needs_reference,
        "with a reference model: --use-kl-loss or --kl-coef",
    ),
    Applies(
        ("ref_load",),
        # There it may be a checkpoint that the policy starts from.
        lambda c: needs_reference(c) or c.cluster.train_backend == "megatron",
        "with a reference model: --use-kl-loss or --kl-coef",
    ),
    Applies(
        ("tis_clip", "tis_clip_low", "custom_tis_function_path"),
        lambda c: c.algorithm.use_tis,
        "with --use-tis",
    ),
    Applies(
        ("custom_megatron_before_log_prob_hook_path",),
        lambda c: needs_reference(c) or not c.algorithm.use_rollout_logprobs,
        "where log-probs are computed: not with the engines' (--use-rollout-logprobs) and no "
        "reference model",
    ),
    Applies(("opsm_delta",), lambda c: c.algorithm.use_opsm, "with --use-opsm"),
    Applies(
        ("custom_loss_function_path",),
        lambda c: c.algorithm.loss_type == "custom_loss",
        "with --loss-type custom_loss",
    ),
    # Optimizer.
    Applies(
        ("min_lr",),
        lambda c: c.optimizer.lr_decay_style != "constant",
        "with a --lr-decay-style that decays",
    ),
    Applies(
        ("lr_decay_iters",),
        lambda c: (
            c.optimizer.lr_decay_style != "constant" or c.optimizer.lr_warmup_fraction is not None
        ),
        "with a --lr-decay-style that decays, or with --lr-warmup-fraction",
    ),
    Applies(
        ("lr_warmup_init",),
        lambda c: c.optimizer.lr_warmup_iters > 0 or c.optimizer.lr_warmup_fraction is not None,
        "with --lr-warmup-iters or --lr-warmup-fraction",
    ),
    Applies(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "with --lr-decay-style WSD",
    ),
    # Evaluation.
    Applies(
        (
            "eval_interval",
            "skip_eval_before_train",
            "n_samples_per_eval_prompt",
            "eval_temperature",
            "eval_top_p",
            "eval_top_k",
            "eval_max_response_len",
            "eval_input_key",
            "eval_label_key",
            "eval_reward_key",
            "log_passrate",
            "custom_eval_rollout_log_function_path",
        ),
        evaluates,
        "with --eval-prompt-data (or --eval-function-path)",
    ),
    # Checkpoints, memory, weights, logging.
    Applies(
        ("fsdp_cpu_backend",),
        lambda c: c.fsdp.fsdp_cpu_offload,
        "with --fsdp-cpu-offload",
    ),
    Applies(
        (
            "save_interval",
            "save_keep",
            "save_trigger_sentinel",
            "save_hf",
            "async_save",
            "no_save_optim",
        ),
        lambda c: c.checkpoint.save is not None,
        "with --save",
    ),
    Applies(
        ("update_weight_transfer_mode",),
        lambda c: not c.cluster.colocate,
        "without --colocate, where weights pass through shared memory",
    ),
    Applies(
        (
            "wandb_mode",
            "wandb_dir",
            "wandb_team",
            "wandb_project",
            "wandb_group",
            "wandb_run_id",
        ),
        lambda c: c.observability.use_wandb,
        "with --use-wandb",
    ),
    # What only one kind of training has.
    Applies(
        (
            "advantage_estimator",
            "normalize_advantages",
            "grpo_std_normalization",
            "rewards_normalization",
            "gamma",
            "eps_clip",
            "eps_clip_high",
            "eps_clip_c",
            "entropy_coef",
            "kl_coef",
            "use_kl_loss",
            "use_rollout_logprobs",
            "use_tis",
            "use_opsm",
            "over_sampling_batch_size",
            "partial_rollout",
            "dynamic_sampling_filter_path",
            "rollout_sample_filter_path",
            "rollout_all_samples_process_path",
            "custom_megatron_before_log_prob_hook_path",
            "custom_reward_post_process_path",
        ),
        lambda c: not is_supervised(c),
        "to training on rewards; --loss-type is sft_loss",
    ),
    Applies(
        (
            "rollout_num_gpus",
            "rollout_num_gpus_per_engine",
            "rollout_engine",
            "rollout_external",
            "rollout_external_engine_addrs",
            "rollout_temperature",
            "rollout_top_p",
            "rollout_top_k",
            "rollout_max_response_len",
            "rollout_skip_special_tokens",
            "rollout_stop",
            "rollout_stop_token_ids",
            "custom_generate_function_path",
            "sglang_server_concurrency",
            "sglang_context_length",
            "sglang_max_running_requests",
            "sglang_max_total_tokens",
            "sglang_mem_fraction_static",
            "sglang_dtype",
            "sglang_router_ip",
            "sglang_router_port",
            "sglang_log_level",
            "rollout_engine_start_timeout_s",
            "use_fault_tolerance",
            "rollout_health_check_interval",
            "rollout_health_check_timeout",
            "rollout_health_check_first_wait",
            "rollout_request_timeout_s",
            "deterministic_rollout",
            "pause_generation_mode",
            "colocate",
            "offload_rollout",
            "rm_type",
            "rm_timeout_s",
            "rm_max_retries",
            "rm_default",
            "custom_rm_path",
            "reward_key",
            "update_weight_transfer_mode",
            "update_weight_buffer_size",
            "update_weight_timeout_s",
            "check_weight_update_equal",
        ),
        lambda c: needs_engines(c) or not is_supervised(c),
        "where there are engines: not to --loss-type sft_loss without evaluation",
    ),
)
"""Debugging (--debug-rollout-only, --load-debug-rollout-data) is no condition: it is meant to be
added to the command line of the run that is looked into."""


def flags_given_have_an_effect(config: MilesConfig, given: Given) -> list[Problem]:
    """No flag is given that would be ignored."""
    return [
        problem(config, dest, remedy=f"applies only {rule.to}; change that or leave this out")
        for rule in APPLIES
        if not rule.condition(config)
        for dest in rule.dests
        if dest in given
    ]


def _has_own_generate(config: MilesConfig) -> bool:
    return config.hooks.custom_generate_function_path is not None


def _rows_may_name_rewards(config: MilesConfig) -> bool:
    data_sets = [config.data.prompt_data or "", *config.evaluation.eval_prompt_data[1::2]]
    of_files = any(spec and not spec.startswith("reasoning_gym:") for spec in data_sets)
    of_users = config.hooks.data_source_path is not None
    scored = needs_engines(config) and config.hooks.custom_rm_path is None
    return scored and (of_files or of_users)


def _aborts_surplus(config: MilesConfig) -> bool:
    size, batch = config.rollout.over_sampling_batch_size, config.data.rollout_batch_size
    over_samples = size is not None and batch is not None and size > batch
    hooks = config.hooks
    return (
        over_samples
        or hooks.dynamic_sampling_filter_path is not None
        or hooks.rollout_function_path is not None
    )


APPLIES_CHECKS: tuple[Check, ...] = (flags_given_have_an_effect,)
