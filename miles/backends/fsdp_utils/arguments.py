"""What the FSDP backend demands of the flags, and its answer to flags that it does not have.

The other backend adapts Megatron's own parser in its module of this name; here nothing is parsed.
"""

import importlib.util
from collections.abc import Mapping

from miles.config.command_line import Foreign
from miles.config.errors import Problem
from miles.config.lora_flags import is_lora_flag
from miles.config.megatron_flags import MEGATRON_FLAGS, REFUSED_FLAGS
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem

ATTENTION_PACKAGES: Mapping[str, str] = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""transformers attention -> the module that it needs."""

ATTENTIONS = ("eager", "sdpa", "flex_attention", *ATTENTION_PACKAGES)
"""Names that transformers knows; one with a slash is a kernel of the hub."""

_ARCHITECTURE = (
    "leave it out: the architecture comes from the config.json of --hf-checkpoint, not from flags"
)
_DATA_PARALLEL = (
    "leave it out: this backend shards over data-parallel ranks only (--dp-replicate-size); to "
    "split a model inside itself, use --train-backend megatron"
)
_RECOMPUTE = "use --gradient-checkpointing instead"
_CPU_OPTIMIZER = "leave it out: it is about Megatron's optimizers"
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "ffn-hidden-size",
            "group-query-attention",
            "hidden-size",
            "kv-channels",
            "max-position-embeddings",
            "moe-ffn-hidden-size",
            "norm-epsilon",
            "normalization",
            "num-attention-heads",
            "num-experts",
            "num-layers",
            "num-query-groups",
            "rotary-base",
            "rotary-percent",
            "spec",
            "swiglu",
            "untie-embeddings-and-output-weights",
        ),
        _ARCHITECTURE,
    ),
    **dict.fromkeys(
        (
            "expert-model-parallel-size",
            "expert-tensor-parallel-size",
            "pipeline-model-parallel-size",
            "sequence-parallel",
            "tensor-model-parallel-size",
        ),
        _DATA_PARALLEL,
    ),
    **dict.fromkeys(
        (
            "recompute-activations",
            "recompute-granularity",
            "recompute-method",
            "recompute-modules",
            "recompute-num-layers",
        ),
        _RECOMPUTE,
    ),
    **dict.fromkeys(
        (
            "optimizer-offload-fraction",
            "overlap-cpu-optimizer-d2h-h2d",
            "use-precision-aware-optimizer",
            "use-torch-optimizer-for-cpu-offload",
        ),
        _CPU_OPTIMIZER,
    ),
    "optimizer-cpu-offload": "use --fsdp-cpu-offload, which also takes the weights there",
    "bf16": "leave it out: bf16 is the default (--fp16 and --fp32 are the others)",
    "batch-size": "use --rollout-batch-size (prompts) or --global-batch-size (samples of a step)",
    "persistent-save-interval": "use --save-interval instead",
}


def check(config: MilesConfig, given: frozenset[str]) -> list[Problem]:
    """Everything that this backend cannot do as asked. Reads no file and imports no torch."""
    return [*_layout(config), *_attention(config), *_precision(config)]


def refuse(foreign: Foreign) -> Problem | None:
    """The problem of a flag that belongs to the other backend; ``None`` for any other flag."""
    name = foreign.name.removeprefix("--")
    where = f" (in {foreign.file})" if foreign.file is not None else ""
    if is_lora_flag(name):
        remedy = "LoRA is not supported by the fsdp backend, which trains all weights; leave it out"
        return Problem(foreign.name, foreign.value, remedy + where)
    if name not in MEGATRON_FLAGS:
        return None
    elsewhere = "" if name in REFUSED_FLAGS else ", or train with --train-backend megatron"
    remedy = _REMEDIES.get(name, f"leave it out{elsewhere}")
    reason = "a flag of Megatron's, which the fsdp backend does not have"
    return Problem(foreign.name, foreign.value, f"{reason}; {remedy}{where}")


def missing_attention_package(implementation: str) -> str | None:
    """The package that an explicit attention needs and that is not installed, if any."""
    hub_kernel = "/" in implementation
    package = "kernels" if hub_kernel else ATTENTION_PACKAGES.get(implementation)
    if package is None or _is_installed(package):
        return None
    return package


def _layout(config: MilesConfig) -> list[Problem]:
    problems: list[Problem] = []
    cluster, replicas = config.cluster, config.fsdp.dp_replicate_size
    ranks = cluster.num_train_ranks
    if replicas > 0 and ranks % replicas != 0:
        remedy = (
            f"must divide the number of trainer ranks: --actor-num-nodes {cluster.actor_num_nodes} "
            f"x --actor-num-gpus-per-node {cluster.actor_num_gpus_per_node} = {ranks}, and {ranks} "
            f"/ {replicas} is not a whole number"
        )
        problems.append(problem(config, "dp_replicate_size", remedy=remedy))
    if config.cluster.context_parallel_size > 1:
        remedy = (
            "the fsdp backend has no context parallelism; leave it out, or train with "
            "--train-backend megatron"
        )
        problems.append(problem(config, "context_parallel_size", remedy=remedy))
    return problems


def _attention(config: MilesConfig) -> list[Problem]:
    implementation = config.fsdp.attn_implementation
    if not (implementation is None or "/" in implementation or implementation in ATTENTIONS):
        remedy = f"one of {', '.join(ATTENTIONS)}, or a kernel of the hub (owner/name)"
        return [problem(config, "attn_implementation", remedy=remedy)]
    package = None if implementation is None else missing_attention_package(implementation)
    if package is None:
        return []
    remedy = f"needs the package {package}, which is not installed; install it or use sdpa"
    return [problem(config, "attn_implementation", remedy=remedy)]


def _precision(config: MilesConfig) -> list[Problem]:
    if not config.precision.fp16 or config.fsdp.keep_fp32_master:
        return []
    remedy = "Adam's second moment underflows in fp16: keep the fp32 master or compute in bf16"
    return [problem(config, "fp16", "keep_fp32_master", remedy=remedy)]


def _is_installed(package: str) -> bool:
    parent, _, child = package.partition(".")
    if importlib.util.find_spec(parent) is None:
        return False
    return not child or importlib.util.find_spec(package) is not None
