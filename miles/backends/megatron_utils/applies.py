"""Megatron's flags that mean something only beside others, for some models or on some machines.

As with our own flags (``miles/config/rules/applies.py``), one that would be ignored is refused.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from miles.backends.megatron_utils import package
from miles.config.command_line import Foreign
from miles.config.errors import Problem
from miles.config.root import MilesConfig

Condition = Callable[[argparse.Namespace, MilesConfig], bool]
"""Of Megatron's parsed but not yet validated namespace, and our config."""


@dataclass(frozen=True)
class Applies:
    """These flags have an effect only when the condition holds."""

    names: str
    """Without the dashes in front, separated by spaces; a ``*`` stands for any end."""
    condition: Condition
    to: str
    """Completes "applies only ..."."""


def check(args: argparse.Namespace, config: MilesConfig, given: Sequence[Foreign]) -> list[Problem]:
    """One problem for each flag of Megatron's in ``given`` that would have no effect."""
    problems: list[Problem] = []
    for flag in given:
        name = flag.name.removeprefix("--")
        rows = (row for row in APPLIES if any(fnmatchcase(name, n) for n in row.names.split()))
        row = next((row for row in rows if not row.condition(args, config)), None)
        if row is not None:
            problems.append(Problem(flag.name, flag.value, f"applies only {row.to}; leave it out"))
    return problems


def _is_bf16(args: argparse.Namespace, config: MilesConfig) -> bool:
    return not (config.precision.fp16 or config.precision.fp32)


def _is_interleaved(args: argparse.Namespace, config: MilesConfig) -> bool:
    return any(
        given is not None
        for given in (
            args.num_layers_per_virtual_pipeline_stage,
            args.num_virtual_stages_per_pipeline_rank,
            args.pipeline_model_parallel_layout,
        )
    )


def _recomputes(args: argparse.Namespace, config: MilesConfig) -> bool:
    return args.recompute_granularity is not None or args.recompute_activations


def _recomputes_modules(args: argparse.Namespace, config: MilesConfig) -> bool:
    return args.recompute_granularity == "selective" or args.recompute_activations


def _has_balancing_loss(args: argparse.Namespace, config: MilesConfig) -> bool:
    return args.moe_router_load_balancing_type in ("aux_loss", ["aux_loss"])


def _balancing_coefficients(args: argparse.Namespace) -> list[float]:
    given = args.moe_aux_loss_coeff
    return given if isinstance(given, list) else [given]


APPLIES: tuple[Applies, ...] = (
    # The machine.
    Applies(
        """attention-backend cp-comm-type cpu-offloading-num-layers
        fine-grained-activation-offloading flash-attention-version fp32-residual-connection
        fused-residual-rmsnorm moe-permute-fusion moe-router-fusion
        overlap-dispatch-backward-with-experts-wgrad te-precision-config-file
        te-rng-tracker use-te-activation-func use-transformer-engine-op-fuser""",
        lambda args, config: package.has_transformer_engine(),
        "with Transformer Engine, which is not installed",
    ),
    # The model.
    Applies(
        "moe-*",
        lambda args, config: bool(args.num_experts),
        "to a mixture of experts, which the model of --hf-checkpoint is not",
    ),
    # Precision.
    Applies(
        "grad-reduce-in-bf16 main-grads-dtype",
        _is_bf16,
        "to bf16 training: without --fp16 and --fp32",
    ),
    Applies(
        """ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation""",
        lambda args, config: args.grad_reduce_in_bf16 or args.main_grads_dtype != "fp32",
        "where gradients are not reduced in fp32: with --grad-reduce-in-bf16",
    ),
    Applies(
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
        lambda args, config: args.use_precision_aware_optimizer,
        "with --use-precision-aware-optimizer",
    ),
    Applies(
        "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis",
        lambda args, config: config.precision.fp16,
        "with --fp16",
    ),
    Applies(
        "initial-loss-scale min-loss-scale loss-scale-window hysteresis",
        lambda args, config: args.loss_scale is None,
        "without --loss-scale, which never changes",
    ),
    Applies(
        """fp8-param-gather fp8-recipe fp8-quantizer-factory fp8-margin fp8-amax-history-len
        fp8-amax-compute-algo no-fp8-wgrad disable-fp8-wgrad reuse-grad-buf-for-mxfp8-param-ag""",
        lambda args, config: args.fp8 is not None,
        "with --fp8-format",
    ),
    Applies(
        "fp4-param-gather fp4-recipe fp4-quantizer-factory",
        lambda args, config: args.fp4 is not None,
        "with --fp4-format",
    ),
    Applies(
        "first-last-layers-bf16 moe-router-padding-for-fp8 moe-router-padding-for-quantization",
        lambda args, config: args.fp8 is not None or args.fp4 is not None,
        "with --fp8-format or --fp4-format",
    ),
    Applies(
        "num-layers-at-start-in-bf16 num-layers-at-end-in-bf16",
        lambda args, config: args.first_last_layers_bf16,
        "with --first-last-layers-bf16",
    ),
    # Memory.
    Applies(
        """overlap-cpu-optimizer-d2h-h2d optimizer-offload-fraction
        use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params""",
        lambda args, config: args.optimizer_cpu_offload,
        "with --optimizer-cpu-offload",
    ),
    Applies(
        "recompute-method recompute-num-layers distribute-saved-activations",
        _recomputes,
        "with --recompute-granularity",
    ),
    Applies(
        "recompute-modules",
        _recomputes_modules,
        "with --recompute-granularity selective",
    ),
    Applies(
        "cpu-offloading-retain-pinned-cpu-buffers",
        lambda args, config: args.cpu_offloading_num_layers > 0,
        "with --cpu-offloading-num-layers",
    ),
    Applies(
        """offload-modules min-offloaded-tensor-size delta-offload-bytes-across-pp-ranks
        activation-offload-fraction fine-grained-offloading-max-inflight-offloads""",
        lambda args, config: args.fine_grained_activation_offloading,
        "with --fine-grained-activation-offloading",
    ),
    # Ranks.
    Applies(
        "sequence-parallel",
        lambda args, config: args.tensor_model_parallel_size > 1,
        "with a --tensor-model-parallel-size above 1",
    ),
    Applies(
        """pipeline-model-parallel-comm-backend pipeline-model-parallel-layout
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
        num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank""",
        lambda args, config: args.pipeline_model_parallel_size > 1,
        "with a --pipeline-model-parallel-size above 1",
    ),
    Applies(
        """overlap-p2p-communication-warmup-flush
        microbatch-group-size-per-virtual-pipeline-stage""",
        _is_interleaved,
        "with virtual pipeline stages (--num-virtual-stages-per-pipeline-rank)",
    ),
    Applies(
        "cp-comm-type",
        lambda args, config: config.cluster.context_parallel_size > 1,
        "with a --context-parallel-size above 1",
    ),
    Applies(
        "ddp-num-buckets ddp-bucket-size",
        lambda args, config: args.overlap_grad_reduce,
        "with --overlap-grad-reduce",
    ),
    Applies(
        "sharp-enabled-group",
        lambda args, config: args.use_sharp,
        "with --use-sharp",
    ),
    Applies(
        "disable-symmetric-registration",
        lambda args, config: args.nccl_ub,
        "with --use-nccl-ub",
    ),
    # Mixtures of experts.
    Applies(
        "moe-router-load-balancing-type",
        lambda args, config: (
            not _has_balancing_loss(args, config) or any(_balancing_coefficients(args))
        ),
        "with a --moe-aux-loss-coeff above 0",
    ),
    Applies(
        "moe-aux-loss-coeff",
        lambda args, config: (
            _has_balancing_loss(args, config) or not any(_balancing_coefficients(args))
        ),
        "with --moe-router-load-balancing-type aux_loss",
    ),
    Applies(
        """moe-enable-deepep moe-flex-* moe-deepep-* moe-hybridep-* moe-ncclep-*
        moe-permute-fusion-into-hybridep""",
        lambda args, config: args.moe_token_dispatcher_type == "flex",
        "with --moe-token-dispatcher-type flex",
    ),
)
