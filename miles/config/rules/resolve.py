"""Derivations: each fills fields that were left open, and never contradicts one that was given.

The only values ever replaced are those that another flag makes meaningless; ``resolve`` reports
them with the rule's own first line as the reason.
"""

import os
from collections.abc import Callable
from dataclasses import replace

from miles.config.derived import needs_reference
from miles.config.root import MilesConfig
from miles.config.rules.problems import option_name, values_of

Resolve = Callable[[MilesConfig], MilesConfig]


def engines_share_the_trainers_gpus(config: MilesConfig) -> MilesConfig:
    """With --colocate the engines are on the trainer's GPUs, so their number is the trainer's."""
    if not config.cluster.colocate:
        return config
    ranks = config.cluster.num_train_ranks
    return replace(config, cluster=replace(config.cluster, rollout_num_gpus=ranks))


def external_engines_bring_their_gpus(config: MilesConfig) -> MilesConfig:
    """With --rollout-external the engines are those of the addresses, each of the same size."""
    cluster, engines = config.cluster, len(config.rollout.rollout_external_engine_addrs)
    if not config.rollout.rollout_external or not engines:
        return config
    gpus = engines * cluster.rollout_num_gpus_per_engine
    return replace(config, cluster=replace(cluster, rollout_num_gpus=gpus))


def colocated_sides_take_turns(config: MilesConfig) -> MilesConfig:
    """Both sides leave the device in the other's phase with --colocate, and stay without."""
    offload, colocate = config.offload, config.cluster.colocate
    train = colocate if offload.offload_train is None else offload.offload_train
    rollout = colocate if offload.offload_rollout is None else offload.offload_rollout
    return replace(config, offload=replace(offload, offload_train=train, offload_rollout=rollout))


def offload_has_a_directory(config: MilesConfig) -> MilesConfig:
    """--offload-train-disk-dir is in $SCRATCH, else in /scratch, when not given."""
    offload = config.offload
    if offload.offload_train_target != "disk" or offload.offload_train_disk_dir is not None:
        return config
    name = f"miles_train_offload_{os.getuid()}"
    directory = os.path.join(os.environ.get("SCRATCH") or "/scratch", name)
    return replace(config, offload=replace(offload, offload_train_disk_dir=directory))


def upper_clip_is_the_lower(config: MilesConfig) -> MilesConfig:
    """--eps-clip-high is --eps-clip when not given."""
    algorithm = config.algorithm
    if algorithm.eps_clip_high is not None:
        return config
    return replace(config, algorithm=replace(algorithm, eps_clip_high=algorithm.eps_clip))


def steps_divide_the_rollout(config: MilesConfig) -> MilesConfig:
    """--global-batch-size and --num-steps-per-rollout follow from each other.

    With neither, the whole rollout is one step. The last step takes the remainder, so the number
    of steps is rounded up.
    """
    data = config.data
    samples, batch, steps = samples_per_rollout(config), data.global_batch_size, None
    if samples is None:
        return config
    if data.num_steps_per_rollout is not None and batch is None:
        steps = data.num_steps_per_rollout
        batch = samples // steps if steps > 0 and samples % steps == 0 else None
    elif data.num_steps_per_rollout is None and (batch is None or batch > 0):
        batch = samples if batch is None else batch
        steps = -(-samples // batch)
    else:
        return config
    return replace(config, data=replace(data, global_batch_size=batch, num_steps_per_rollout=steps))


def submit_one_batch_at_a_time(config: MilesConfig) -> MilesConfig:
    """--over-sampling-batch-size is --rollout-batch-size when not given."""
    rollout = config.rollout
    if rollout.over_sampling_batch_size is not None:
        return config
    size = config.data.rollout_batch_size
    return replace(config, rollout=replace(rollout, over_sampling_batch_size=size))


def prompts_leave_room_for_a_token(config: MilesConfig) -> MilesConfig:
    """--rollout-max-prompt-len is one less than --rollout-max-context-len when not given."""
    rollout = config.rollout
    context = rollout.rollout_max_context_len
    if context is None or rollout.rollout_max_prompt_len is not None:
        return config
    return replace(config, rollout=replace(rollout, rollout_max_prompt_len=context - 1))


def evaluation_samples_as_the_rollout(config: MilesConfig) -> MilesConfig:
    """Evaluation's sampling and columns are the rollout's when not given."""
    evaluation, rollout, data = config.evaluation, config.rollout, config.data
    defaults = {
        "eval_temperature": rollout.rollout_temperature,
        "eval_top_p": rollout.rollout_top_p,
        "eval_top_k": rollout.rollout_top_k,
        "eval_max_response_len": rollout.rollout_max_response_len,
        "eval_input_key": data.input_key,
        "eval_label_key": data.label_key,
    }
    given = values_of(config)
    missing = {dest: value for dest, value in defaults.items() if given[dest] is None}
    return replace(config, evaluation=replace(evaluation, **missing))


def evaluation_rewards_as_the_rollout(config: MilesConfig) -> MilesConfig:
    """--eval-reward-key is --reward-key when not given."""
    reward = config.reward
    if reward.eval_reward_key is not None:
        return config
    return replace(config, reward=replace(reward, eval_reward_key=reward.reward_key))


def reference_is_the_initial_model(config: MilesConfig) -> MilesConfig:
    """--ref-load is --hf-checkpoint when a reference is needed and none is given."""
    if config.algorithm.ref_load is not None or not needs_reference(config):
        return config
    path = config.rollout.hf_checkpoint
    return replace(config, algorithm=replace(config.algorithm, ref_load=path))


def one_sample_has_no_deviation(config: MilesConfig) -> MilesConfig:
    """A group of one sample has no deviation to divide by."""
    algorithm = config.algorithm
    if config.data.n_samples_per_prompt != 1 or algorithm.loss_type != "policy_loss":
        return config
    return replace(config, algorithm=replace(algorithm, grpo_std_normalization=False))


RESOLVE: tuple[Resolve, ...] = (
    engines_share_the_trainers_gpus,
    external_engines_bring_their_gpus,
    colocated_sides_take_turns,
    offload_has_a_directory,
    upper_clip_is_the_lower,
    steps_divide_the_rollout,
    submit_one_batch_at_a_time,
    prompts_leave_room_for_a_token,
    evaluation_samples_as_the_rollout,
    evaluation_rewards_as_the_rollout,
    reference_is_the_initial_model,
    one_sample_has_no_deviation,
)


def samples_per_rollout(config: MilesConfig) -> int | None:
    """Samples of a full rollout; ``None`` when the flags do not say (or say nonsense)."""
    prompts, samples = config.data.rollout_batch_size, config.data.n_samples_per_prompt
    return prompts * samples if prompts is not None and prompts > 0 and samples > 0 else None


def resolve(config: MilesConfig) -> tuple[MilesConfig, list[str]]:
    """Fill what was left open; the messages say which given values were replaced, and why."""
    messages: list[str] = []
    for rule in RESOLVE:
        before, config = values_of(config), rule(config)
        after = values_of(config)
        reason = (rule.__doc__ or "").splitlines()[0]
        messages += [
            f"{option_name(dest)}: {before[dest]!r} becomes {after[dest]!r}. {reason}"
            for dest in before
            if before[dest] is not None and before[dest] != after[dest]
        ]
    return config, messages
