"""Prompts in, batches out."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: prompts in, batches out."""

    prompt_data: Annotated[
        str | None,
        Doc(
            "Prompts: a .jsonl or .parquet file, optionally with a row slice (file@[a:b], negative "
            "too), or a reasoning-gym task family (reasoning_gym:chain_sum)."
        ),
    ] = None
    prompt_data_kwargs: Annotated[
        dict[str, Any], Doc("Arguments of the reasoning-gym family (JSON; size, seed, ...).")
    ] = field(default_factory=dict[str, Any])
    input_key: Annotated[str, Doc("Column of the prompt: text or a message list.")] = "input"
    label_key: Annotated[
        str | None,
        Doc("Column of the label: text, or a whole number, which becomes its digits."),
    ] = None
    metadata_key: Annotated[str, Doc("Column of the metadata object (optional in a row).")] = (
        "metadata"
    )
    tool_key: Annotated[str, Doc("Column of the tool schemas (optional in a row).")] = "tools"
    apply_chat_template: Annotated[
        bool, Doc("Render prompts with the tokenizer's chat template.")
    ] = False
    apply_chat_template_kwargs: Annotated[
        dict[str, Any], Doc("Extra arguments of the chat template (JSON object).")
    ] = field(default_factory=dict[str, Any])
    chat_template_path: Annotated[
        str | None, Doc("A jinja file that replaces the tokenizer's chat template.")
    ] = None
    loss_mask_type: Annotated[
        Literal["qwen", "qwen3", "distill_qwen"],
        Doc(
            "Supervised conversations. qwen: every assistant turn trains; qwen3: each as the "
            "template shows it while it is the newest; distill_qwen: only the last, word for word."
        ),
    ] = "qwen"
    num_rollout: Annotated[
        int | None, Doc("Rollouts to run, counted from 0 (also after a resume).")
    ] = None
    num_epoch: Annotated[
        int | None,
        Doc(
            "Epochs over the prompts: the other way to say --num-rollout (rounded down to whole "
            "rollouts, but at least one; the prompts of one may span two epochs)."
        ),
    ] = None
    start_rollout_id: Annotated[
        int | None, Doc("First rollout id; by default what the checkpoint says, else 0.")
    ] = None
    rollout_batch_size: Annotated[int | None, Doc("Prompts of one rollout (required).")] = None
    n_samples_per_prompt: Annotated[int, Doc("Responses to each prompt.")] = 1
    global_batch_size: Annotated[
        int | None,
        Doc(
            "Samples (not prompts) of one optimizer step; by default the whole rollout. Where it "
            "does not divide the rollout, the last step has the samples that are left."
        ),
        Flag(shared=True),
    ] = None
    num_steps_per_rollout: Annotated[
        int | None,
        Doc("Optimizer steps of one rollout; the other way to say --global-batch-size."),
    ] = None
    micro_batch_size: Annotated[
        int,
        Doc("Samples of a micro-batch, padded; not used with --use-dynamic-batch-size."),
        Flag(shared=True),
    ] = 1
    use_dynamic_batch_size: Annotated[
        bool, Doc("Pack samples into rows up to --max-tokens-per-gpu.")
    ] = False
    max_tokens_per_gpu: Annotated[
        int | None, Doc("Token budget of a packed micro-batch on one GPU.")
    ] = None
    rollout_shuffle: Annotated[bool, Doc("Shuffle the prompts anew in each epoch.")] = False
    rollout_seed: Annotated[int, Doc("Seed of the shuffle and of seeded sampling.")] = 42
