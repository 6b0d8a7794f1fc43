"""What every run needs, and what some runs need."""

from miles.config.derived import evaluates, generates_rollouts, needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem


def model_is_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Every run starts from a model."""
    if config.rollout.hf_checkpoint is not None:
        return []
    remedy = "is required: a Hugging Face directory with config, tokenizer and weights"
    return [problem(config, "hf_checkpoint", remedy=remedy)]


def batch_is_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Every run says how many prompts a rollout has."""
    if config.data.rollout_batch_size is not None:
        return []
    return [problem(config, "rollout_batch_size", remedy="is required: prompts of one rollout")]


def length_of_the_run_is_given(config: MilesConfig, given: Given) -> list[Problem]:
    """The number of rollouts is given in one way."""
    data = config.data
    if data.num_rollout is not None and data.num_epoch is not None:
        remedy = "both say how long to run; leave one out"
        return [problem(config, "num_rollout", "num_epoch", remedy=remedy)]
    if data.num_rollout is None and data.num_epoch is None:
        remedy = "is required (or --num-epoch): rollouts to run"
        return [problem(config, "num_rollout", remedy=remedy)]
    if data.num_rollout is None and config.observability.load_debug_rollout_data is not None:
        remedy = "recorded rollouts have no epochs; give --num-rollout instead"
        return [problem(config, "num_epoch", remedy=remedy)]
    return []


def response_length_is_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Generation is bounded."""
    limit = config.rollout.rollout_max_response_len
    if generates_rollouts(config) and limit is None:
        remedy = "is required: most new tokens of a response"
        return [problem(config, "rollout_max_response_len", remedy=remedy)]
    limit = config.evaluation.eval_max_response_len
    if needs_engines(config) and evaluates(config) and limit is None:
        remedy = "is required: most new tokens of a response in evaluation"
        return [problem(config, "eval_max_response_len", remedy=remedy)]
    return []


def engines_have_gpus(config: MilesConfig, given: Given) -> list[Problem]:
    """Engines sit on GPUs of their own or share the trainer's."""
    if config.cluster.rollout_num_gpus is not None or not needs_engines(config):
        return []
    if config.rollout.rollout_external:
        return []  # They bring theirs.
    remedy = "is required: GPUs for the engines (or --colocate, to share the trainer's)"
    return [problem(config, "rollout_num_gpus", remedy=remedy)]


def reward_is_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Responses are scored in one way."""
    kind, custom = config.reward.rm_type, config.hooks.custom_rm_path
    if kind is not None and custom is not None:
        remedy = "both score a response; leave one out"
        return [problem(config, "rm_type", "custom_rm_path", remedy=remedy)]
    scored = needs_engines(config)
    replaced = config.hooks.rollout_function_path is not None
    if kind is not None or custom is not None or replaced or not scored:
        return []
    remedy = "is required (or --custom-rm-path): how a response is scored; rows may overrule it"
    return [problem(config, "rm_type", remedy=remedy)]


def companions_are_given(config: MilesConfig, given: Given) -> list[Problem]:
    """Flags that need another one have it."""
    hooks, data, optimizer = config.hooks, config.data, config.optimizer
    rollout = config.rollout
    by_data = bool(config.evaluation.eval_prompt_data)
    evaluated = "--eval-prompt-data" if by_data else "--eval-function-path"
    missing = (
        (
            "custom_loss_function_path",
            config.algorithm.loss_type == "custom_loss" and hooks.custom_loss_function_path is None,
            "is required with --loss-type custom_loss",
        ),
        (
            "max_tokens_per_gpu",
            data.use_dynamic_batch_size and data.max_tokens_per_gpu is None,
            "is required with --use-dynamic-batch-size",
        ),
        (
            "eval_interval",
            evaluates(config) and config.evaluation.eval_interval is None,
            f"is required with {evaluated}: rollouts between evaluations",
        ),
        (
            "lr_wsd_decay_iters",
            optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_iters is None,
            "is required with --lr-decay-style WSD: steps of the final decay",
        ),
        (
            "sglang_router_ip",
            rollout.sglang_router_ip is None and rollout.sglang_router_port is not None,
            "is required with --sglang-router-port: where that router runs",
        ),
        (
            "sglang_router_port",
            rollout.sglang_router_ip is not None and rollout.sglang_router_port is None,
            "is required with --sglang-router-ip",
        ),
        (
            "generate_execute_tool_function_path",
            hooks.generate_tool_specs_path is not None
            and hooks.generate_execute_tool_function_path is None,
            "is required with --generate-tool-specs-path: runs the calls of these tools",
        ),
    )
    return [problem(config, dest, remedy=remedy) for dest, wrong, remedy in missing if wrong]


REQUIRED_CHECKS: tuple[Check, ...] = (
    model_is_given,
    batch_is_given,
    length_of_the_run_is_given,
    response_length_is_given,
    engines_have_gpus,
    reward_is_given,
    companions_are_given,
)
