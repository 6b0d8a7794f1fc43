"""What must hold between Megatron's flags, the ranks of a run and the model: pure rules.

Megatron checks much of it too, but stops at the first, and without saying where a number is from.
"""

import argparse
from collections.abc import Callable, Sequence

from miles.backends.megatron_utils import package
from miles.backends.megatron_utils.offload_rules import OFFLOAD_RULES
from miles.backends.megatron_utils.pipeline_rules import PIPELINE_RULES
from miles.config.errors import Problem
from miles.config.messages import Message, warning
from miles.config.root import MilesConfig

Rule = Callable[[argparse.Namespace, MilesConfig], list[Problem]]
"""Megatron's parsed but not yet validated namespace, and our config."""


def check(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Everything wrong, an empty list when nothing is."""
    sizes = sizes_are_positive(args, config)
    return sizes or [problem for rule in RULES for problem in rule(args, config)]


def warnings(args: argparse.Namespace) -> list[Message]:
    """What works but was probably not meant."""
    size = args.tensor_model_parallel_size
    if size == 1 or args.sequence_parallel:
        return []
    return [
        warning(
            f"--tensor-model-parallel-size {size} without --sequence-parallel: every rank holds "
            "the activations between the sharded layers whole; add --sequence-parallel unless the "
            "recipe says otherwise"
        )
    ]


def sizes_are_positive(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Every parallel size is at least 1."""
    return [
        Problem(flag, vars(args)[dest], "must be at least 1")
        for flag, dest in _SIZES.items()
        if vars(args)[dest] is not None and vars(args)[dest] < 1
    ]


def dimensions_divide_the_ranks(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """TP x PP x CP ranks hold one copy of the model; EP x ETP x PP one copy of the experts."""
    products = [("tensor_model_parallel_size", "pipeline_model_parallel_size", _CONTEXT)]
    if args.num_experts:
        expert = ("expert_model_parallel_size", "expert_tensor_parallel_size")
        products.append((*expert, "pipeline_model_parallel_size"))
    return [problem for dests in products for problem in _product_problem(args, config, dests)]


def experts_need_a_mixture(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Expert parallelism is for models with experts."""
    if args.num_experts:
        return []
    remedy = "the model of --hf-checkpoint has no experts; leave it out"
    return [
        Problem(flag, vars(args)[dest], remedy)
        for flag, dest in _SIZES.items()
        if flag.startswith("--expert-") and (vars(args)[dest] or 1) > 1
    ]


def shards_are_whole(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """What a dimension splits is a multiple of it."""
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    expert_tensor = args.expert_tensor_parallel_size or tensor
    rows = (
        ("--tensor-model-parallel-size", tensor, "attention heads", args.num_attention_heads),
        ("--tensor-model-parallel-size", tensor, "query groups (key-value heads)", groups),
        ("--tensor-model-parallel-size", tensor, "MLP columns", args.ffn_hidden_size),
        ("--expert-model-parallel-size", expert, "experts", args.num_experts),
        ("--expert-tensor-parallel-size", expert_tensor, "expert MLP columns", _expert_width(args)),
    )
    return [
        Problem(flag, size, f"must divide the model's {total} {what}")
        for flag, size, what, total in rows
        if total is not None and total % size != 0
    ]


def experts_with_tensor_parallelism_shard_the_sequence(
    args: argparse.Namespace, config: MilesConfig
) -> list[Problem]:
    """Megatron's MoE layer refuses to train otherwise, though only in its first forward pass."""
    size = args.tensor_model_parallel_size
    if not args.num_experts or size == 1 or args.sequence_parallel:
        return []
    remedy = "a model with experts needs --sequence-parallel with it"
    return [Problem("--tensor-model-parallel-size", size, remedy)]


def tokens_are_dispatched_as_they_come(
    args: argparse.Namespace, config: MilesConfig
) -> list[Problem]:
    """All-gather of tokens needs as many of them on every rank that it gathers from; ranks with
    different samples have different numbers."""
    expert_tensor = _size(args, config, "expert_tensor_parallel_size")
    gathered = args.expert_model_parallel_size * expert_tensor
    sharing = args.tensor_model_parallel_size * config.cluster.context_parallel_size
    if not args.num_experts or args.moe_token_dispatcher_type != "allgather" or gathered <= sharing:
        return []
    remedy = (
        f"needs samples of one length: the {gathered} ranks that hold all experts "
        f"(--expert-model-parallel-size x --expert-tensor-parallel-size) are more than the "
        f"{sharing} that share their samples (TP x CP); use alltoall"
    )
    return [Problem("--moe-token-dispatcher-type", "allgather", remedy)]


def forward_passes_repeat(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """No dropout: the log-probs of a training step would differ from those before it by chance."""
    remedy = "must be 0: the policy ratio compares two forward passes of the same weights"
    return [
        Problem(flag, value, remedy)
        for flag, value in (
            ("--attention-dropout", args.attention_dropout),
            ("--hidden-dropout", args.hidden_dropout),
        )
        if value != 0
    ]


def one_precision(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """--bf16 is the default and excludes the others."""
    others = (("--fp16", config.precision.fp16), ("--fp32", config.precision.fp32))
    return [
        Problem(f"--bf16, {flag}", (True, True), "both say the precision; leave one out")
        for flag, given in others
        if given and args.bf16
    ]


def load_balance_is_of_a_micro_batch(
    args: argparse.Namespace, config: MilesConfig
) -> list[Problem]:
    """Tokens go to the experts with the highest scores, as in the engines, and the loss that
    spreads them depends neither on how samples are packed nor on the ranks that hold them."""
    given = args.moe_router_load_balancing_type
    kinds = [given] if isinstance(given, str) else given
    other = "the engines choose experts by their scores alone"
    layout = "its value depends on how samples are packed and spread over ranks"
    reasons = {
        "sinkhorn": other,
        "quantile_balancing": other,
        "seq_aux_loss": layout,
        "global_aux_loss": layout,
    }
    if not args.num_experts:
        return []
    return [
        Problem("--moe-router-load-balancing-type", kind, f"{reasons[kind]}; use aux_loss or none")
        for kind in kinds
        if kind in reasons
    ]


def formats_are_ours(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """One optimizer, one checkpoint format."""
    problems: list[Problem] = []
    if args.optimizer != "adam":
        problems.append(Problem("--optimizer", args.optimizer, "must be adam"))
    if args.ckpt_format != "torch_dist":
        problems.append(Problem("--ckpt-format", args.ckpt_format, "must be torch_dist"))
    return problems


def kernels_are_installed(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Flags that only Transformer Engine fulfils are refused where it is missing."""
    if package.has_transformer_engine():
        return []
    without = (
        ("--transformer-impl", args.transformer_impl, ("local",)),
        ("--fp8-format", args.fp8, (None,)),
        ("--fp4-format", args.fp4, (None,)),
    )
    return _outside(without, "needs Transformer Engine, which is not installed")


def optimizer_state_is_stored(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """The Adam of this backend stores less than Transformer Engine's; it runs where that is
    missing, and in host memory."""
    if args.optimizer_cpu_offload:
        reason = "is for an optimizer on the device; --optimizer-cpu-offload has one that lacks it"
    elif not package.has_transformer_engine():
        reason = "needs Transformer Engine, which is not installed"
    else:
        return []
    known = (
        ("--exp-avg-dtype", args.exp_avg_dtype, ("fp32", "bf16")),
        ("--exp-avg-sq-dtype", args.exp_avg_sq_dtype, ("fp32", "bf16")),
        ("--main-params-dtype", args.main_params_dtype, ("fp32",)),
    )
    return _outside(known, reason)


def some_of_the_optimizer_is_offloaded(
    args: argparse.Namespace, config: MilesConfig
) -> list[Problem]:
    """Its part in host memory is a part."""
    fraction = args.optimizer_offload_fraction
    if not args.optimizer_cpu_offload or 0 < fraction <= 1:
        return []
    remedy = "must be > 0 and <= 1; without --optimizer-cpu-offload nothing is offloaded"
    return [Problem("--optimizer-offload-fraction", fraction, remedy)]


RULES: tuple[Rule, ...] = (
    dimensions_divide_the_ranks,
    experts_need_a_mixture,
    shards_are_whole,
    *PIPELINE_RULES,
    experts_with_tensor_parallelism_shard_the_sequence,
    tokens_are_dispatched_as_they_come,
    forward_passes_repeat,
    one_precision,
    load_balance_is_of_a_micro_batch,
    formats_are_ours,
    kernels_are_installed,
    optimizer_state_is_stored,
    some_of_the_optimizer_is_offloaded,
    *OFFLOAD_RULES,
)

_CONTEXT = "context_parallel_size"
_SIZES = {
    f"--{dest.replace('_', '-')}": dest
    for dest in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
}


def _size(args: argparse.Namespace, config: MilesConfig, dest: str) -> int:
    if dest == _CONTEXT:
        return config.cluster.context_parallel_size
    if dest == "expert_tensor_parallel_size" and args.expert_tensor_parallel_size is None:
        return args.tensor_model_parallel_size
    return vars(args)[dest]


def _product_problem(
    args: argparse.Namespace, config: MilesConfig, dests: tuple[str, ...]
) -> list[Problem]:
    cluster = config.cluster
    sizes = {f"--{dest.replace('_', '-')}": _size(args, config, dest) for dest in dests}
    product = 1
    for size in sizes.values():
        product *= size
    ranks = cluster.num_train_ranks
    if product > 0 and ranks % product == 0:
        return []
    arithmetic = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
    remedy = (
        f"{arithmetic} = {product} does not divide the ranks: --actor-num-nodes "
        f"{cluster.actor_num_nodes} x --actor-num-gpus-per-node "
        f"{cluster.actor_num_gpus_per_node} = {ranks} (of a tool: torchrun's processes)"
    )
    return [Problem(", ".join(sizes), tuple(sizes.values()), remedy)]


def _outside(
    rows: Sequence[tuple[str, str | None, tuple[str | None, ...]]], reason: str
) -> list[Problem]:
    """A problem for each flag whose value is not among the allowed ones."""
    return [
        Problem(flag, value, f"{reason}; {_alternatives(allowed)}")
        for flag, value, allowed in rows
        if value not in allowed
    ]


def _alternatives(allowed: tuple[str | None, ...]) -> str:
    values = [value for value in allowed if value is not None]
    return f"use {' or '.join(values)}" if values else "leave it out"


def _expert_width(args: argparse.Namespace) -> int | None:
    if not args.num_experts:
        return None
    return args.moe_ffn_hidden_size or args.ffn_hidden_size
