"""User code by dotted path; each is checked against its signature when flags are parsed."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc


@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    """Hooks: user code by dotted path (signatures: docs/customization.md)."""

    data_source_path: Annotated[str | None, Doc("Replaces the prompt source.")] = None
    rollout_function_path: Annotated[str | None, Doc("Replaces the whole rollout.")] = None
    eval_function_path: Annotated[str | None, Doc("Replaces the whole evaluation.")] = None
    custom_generate_function_path: Annotated[
        str | None,
        Doc("Generates the samples of one prompt; miles.rollout.multi_turn.generate is one."),
    ] = None
    generate_tool_specs_path: Annotated[str | None, Doc("Multi-turn: a list of tool schemas.")] = (
        None
    )
    generate_execute_tool_function_path: Annotated[
        str | None, Doc("Multi-turn: runs one tool call.")
    ] = None
    custom_rm_path: Annotated[str | None, Doc("Scores a sample, or a list of them.")] = None
    custom_reward_post_process_path: Annotated[
        str | None, Doc("Replaces group normalisation of rewards.")
    ] = None
    dynamic_sampling_filter_path: Annotated[
        str | None, Doc("Decides whether a finished group is kept.")
    ] = None
    buffer_filter_path: Annotated[
        str | None, Doc("Chooses which unfinished groups go on first.")
    ] = None
    rollout_sample_filter_path: Annotated[
        str | None, Doc("Marks samples of the batch as not to be trained.")
    ] = None
    rollout_all_samples_process_path: Annotated[
        str | None, Doc("Sees all groups of a rollout, kept or not.")
    ] = None
    custom_loss_function_path: Annotated[
        str | None, Doc("The loss of --loss-type custom_loss.")
    ] = None
    custom_tis_function_path: Annotated[str | None, Doc("Replaces the weights of --use-tis.")] = (
        None
    )
    custom_megatron_init_path: Annotated[
        str | None, Doc("Called once Megatron is initialized, before the model is built.")
    ] = None
    custom_megatron_before_log_prob_hook_path: Annotated[
        str | None, Doc("Called before every computation of log-probabilities.")
    ] = None
    custom_megatron_before_train_step_hook_path: Annotated[
        str | None, Doc("Called before every optimizer step's forward and backward passes.")
    ] = None
    custom_rollout_log_function_path: Annotated[
        str | None, Doc("Replaces the metrics of a rollout.")
    ] = None
    custom_eval_rollout_log_function_path: Annotated[
        str | None, Doc("Replaces the metrics of an evaluation.")
    ] = None
