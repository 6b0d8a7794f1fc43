"""What follows from several flags together; asked by the rules and by those who build the job."""

import math

from miles.config.root import MilesConfig


def total_optimizer_steps(config: MilesConfig) -> int:
    """Steps of the whole run, which the learning-rate schedule spans."""
    data = config.data
    if data.num_steps_per_rollout is not None:
        per_rollout = data.num_steps_per_rollout
    else:
        samples = (data.rollout_batch_size or 1) * data.n_samples_per_prompt
        per_rollout = math.ceil(samples / (data.global_batch_size or samples))
    return (data.num_rollout or 1) * per_rollout


def token_budget(config: MilesConfig) -> int | None:
    """Tokens of a packed micro-batch, which the ranks of context parallelism share; ``None`` where
    micro-batches have a number of samples instead."""
    data = config.data
    if not data.use_dynamic_batch_size or data.max_tokens_per_gpu is None:
        return None
    return data.max_tokens_per_gpu * config.cluster.context_parallel_size


def needs_reference(config: MilesConfig) -> bool:
    """Whether KL to a reference model is computed (``--use-kl-loss`` alone only measures it)."""
    return config.algorithm.kl_coef != 0 or config.algorithm.use_kl_loss


def evaluates(config: MilesConfig) -> bool:
    """Whether there is anything to evaluate."""
    return bool(config.evaluation.eval_prompt_data) or config.hooks.eval_function_path is not None


def is_supervised(config: MilesConfig) -> bool:
    """Whether samples come from the data itself instead of from engines."""
    return config.algorithm.loss_type == "sft_loss"


def generates_rollouts(config: MilesConfig) -> bool:
    """Whether engines write the samples to train on."""
    recorded = config.observability.load_debug_rollout_data is not None
    return not recorded and not is_supervised(config)


def needs_engines(config: MilesConfig) -> bool:
    """Whether a job has engines at all: for its rollouts, or for evaluation beside them."""
    return generates_rollouts(config) or evaluates(config)


def ranks_fit_machines(config: MilesConfig) -> bool:
    """Whether the trainer ranks of a node are no more than a machine's accelerators."""
    return config.cluster.actor_num_gpus_per_node <= config.cluster.num_gpus_per_node


def engines_fit_machines(config: MilesConfig) -> bool:
    """Whether an engine is on a part of one machine that divides it, or on all of several."""
    size, engine = config.cluster.num_gpus_per_node, config.cluster.rollout_num_gpus_per_engine
    return size % engine == 0 or engine % size == 0
