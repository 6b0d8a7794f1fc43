"""Megatron's flags that have no place in a run of Miles, each with the reason.

A flag that would do nothing, or that would work against the loop around Megatron, is refused; what
depends on other flags, on the model or on the machine is in ``applies.py``. What neither lists is
Megatron's own business and passes, as does what only says how things are here anyway (among them
``--no-position-embedding``, ``--attention-softmax-in-fp32`` and ``--no-masked-softmax-fusion``).
"""

import argparse
from collections.abc import Mapping

_LOOP = "Miles drives the loop"
_FSDP = "this backend shards with the distributed optimizer; --train-backend fsdp is the other way"
_STEPS = "schedules count optimizer steps: use --lr-warmup-iters, --lr-decay-iters and the like"
_CUDA_GRAPHS = "micro-batches have many shapes, which CUDA graphs cannot replay"
_LENGTHS = "a micro-batch is as long as its samples"
_DIALECT = "no model of the families that convert from Hugging Face has it"
_ADAM = "the optimizer is Adam"
_EXPERTS = "experts keep the layout that converts from Hugging Face, one by one"
_DROPS = (
    "which tokens an expert drops would depend on how samples are packed and spread over ranks; "
    "the engines drop none"
)
_FLIGHT_RECORDER = "the process group is there before Megatron: set PyTorch's TORCH_FR_* variables"
_HEAD = "log-probabilities come from this backend's own head, not from Megatron's loss"
_INFERENCE = "the engines generate, not Megatron"
_KITCHEN = "this version does not quantize with NVIDIA's kitchen library"
_LOADED = "initial weights are read from a checkpoint"
_LOGGING = "metrics go through --run-dir and the trackers"
_ONE_PASS = "this version does not interleave the passes of two micro-batches"
_USER_BUFFERS = "its buffers have one length, and micro-batches are as long as their samples"
_WEIGHT_DECAY = "weight decay reaches all parameters, these norms too: set --weight-decay"

GROUPS: Mapping[str, str] = {
    "rl": f"{_LOOP}, not Megatron's own RL code",
    "profiling": "this version does not profile",
    "validation": "evaluation is --eval-prompt-data's",
    "data and dataloader": "samples come from rollouts, whose lengths they have",
    "tokenizer": "the tokenizer is that of --hf-checkpoint",
    "logging": _LOGGING,
    "checkpointing": "Miles writes and reads the checkpoints (see --load, --save, --async-save)",
    "autoresume": _LOOP,
    "biencoder": "Miles trains language models",
    "vision": "Miles trains language models",
    "heterogeneous architecture": _DIALECT,
    "mla": _DIALECT,
    "Logits Distillation": _LOOP,
    "straggler": _LOOP,
    "workload inspector": _LOOP,
    "inference": _INFERENCE,
    "one logger": _LOGGING,
    "In-process restart": _LOOP,
    "ft_package": _LOOP,
    "rerun engine": _LOOP,
    "msc": "paths are those of a file system",
    "sft": "supervised training is --loss-type sft_loss",
    "fault injector": _LOOP,
}
"""Titles of whole groups of Megatron's parser."""

_NAMES: Mapping[str, str] = {
    """train-iters train-samples exit-interval exit-duration-in-mins exit-signal
    exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training
    manual-gc manual-gc-interval no-manual-gc-eval disable-manual-gc-eval iterations-to-skip
    result-rejected-tracker-filename
    gpu-sniff-test-interval train-sync-interval dataloader-type yaml-cfg local-rank lazy-mpu-init
    fake-process-group check-for-large-grads empty-unused-memory-level
    check-weight-hash-across-dp-replicas-interval""": _LOOP,
    """batch-size rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed""": (
        "use --global-batch-size"
    ),
    "model-parallel-size": "use --tensor-model-parallel-size",
    "checkpoint-activations": "use --recompute-granularity",
    "warmup": "use --lr-warmup-iters",
    """lr-decay-samples lr-wsd-decay-samples lr-warmup-samples override-opt-param-scheduler
    override-opt_param-scheduler use-checkpoint-opt-param-scheduler
    use-checkpoint-opt_param-scheduler start-weight-decay end-weight-decay
    weight-decay-incr-style""": _STEPS,
    """decoupled-lr decoupled-min-lr freeze-all-layers""": "all weights train with --lr",
    "finetune no-load-optim no-load-rng": (
        "a converted directory starts at rollout 0 without optimizer state by itself"
    ),
    """use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy
    outer-dp-sharding-strategy fsdp-double-buffer fsdp-manual-registration
    torch-fsdp2-no-reshard-after-forward enable-full-sharding-in-hsdp keep-fp8-transpose-cache
    megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
    fsdp-db-use-persist-buf-on-alloc-fail init-model-with-meta-device""": _FSDP,
    "create-all-gather-group no-gradient-reduce-div-fusion suggested-communication-unit-size": (
        "only Megatron's FSDP has it"
    ),
    """enable-cuda-graph external-cuda-graph optimizer-cuda-graph
    delay-offload-until-cuda-graph""": _CUDA_GRAPHS,
    "no-use-layer-wise-param-layout": _ADAM,
    "apply-wd-to-qk-layernorm no-weight-decay-cond-type": _WEIGHT_DECAY,
    "ddp-average-in-collective": (
        "gradients are summed: losses are divided by the counts of the whole step"
    ),
    "overlap-param-gather-with-optimizer-step": (
        "Megatron has it for checkpoints of another format alone"
    ),
    """encoder-num-layers decoder-num-layers is-hybrid-model hybrid-layer-pattern
    hybrid-override-pattern disable-mamba-mem-eff-path experimental-attention-variant use-mup
    bert-no-binary-head mrope-section rope-type window-attn-skip-freq
    use-fused-weighted-squared-relu moe-latent-size moe-router-bias-update-rate
    moe-router-quantile-balancing-ema moe-shared-expert-overlap
    use-grouped-gemm-for-shared-expert moe-shared-expert-glu-interleave-size""": _DIALECT,
    """moe-single-grouped-weight moe-single-grouped-bias
    moe-mlp-glu-interleave-size""": _EXPERTS,
    "use-grouped-gemm-for-dense-mlp": "the layers are this backend's or those of --spec",
    """init-method-std embedding-init-method-std init-method-xavier-uniform
    data-parallel-random-init""": _LOADED,
    """cross-entropy-loss-fusion cross-entropy-fusion-impl fp16-lm-cross-entropy fp8-output-proj
    defer-embedding-wgrad-compute wgrad-deferral-limit""": _HEAD,
    """overlap-moe-expert-parallel-comm delay-wgrad-compute ep-overlap-early-attn-memory-release
    high-priority-a2a-comm-stream""": _ONE_PASS,
    """mlp-chunks-for-prefill flash-decode nccl-all-reduce-for-prefill symmetric-ar-type
    moe-pad-experts-for-cuda-graph-inference""": _INFERENCE,
    "batch-invariant-mode": "its kernels are switched on by Megatron's own start-up alone",
    "moe-per-layer-logging dump-param-to-param-group-map": _LOGGING,
    "moe-input-jitter-eps": (
        "the policy ratio compares two forward passes of the same weights, without noise"
    ),
    "use-kitchen-attention": _KITCHEN,
    "use-ring-exchange-p2p": "it needs a build of PyTorch with a kernel that the release lacks",
    "use-flash-attn": "use --attention-backend",
    "fp8-interval": "Transformer Engine ignores it",
    "onnx-safe": "nothing is exported to ONNX",
    "distributed-backend": "the process group is NCCL's on an accelerator and gloo's on a CPU",
    "distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    """hybrid-context-parallel max-seqlen-per-dp-cp-rank hierarchical-context-parallel-sizes""": (
        "every rank of a context-parallel group holds its share of every sample"
    ),
    "moe-use-upcycling moe-upcycling-granularity": "a checkpoint is trained as it is",
    "moe-enable-routing-replay": "this version does not replay the engines' routing",
    """moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy
    moe-expert-rank-capacity-factor""": _DROPS,
    "moe-router-force-load-balancing moe-router-force-biased": (
        "it routes at random, for benchmarks"
    ),
    "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards": (
        "this version does not shard weights beyond tensor parallelism"
    ),
}

PREFIXES: Mapping[str, str] = {
    "inference-": _INFERENCE,
    "mamba-": _DIALECT,
    "dsa-": _DIALECT,
    "no-dsa-": _DIALECT,
    "disable-dsa-": _DIALECT,
    "linear-": _DIALECT,
    "mtp-": _DIALECT,
    "mup-": _DIALECT,
    "qk-clip": _DIALECT,
    "relative-attention-": _DIALECT,
    "yarn-": _DIALECT,
    "no-yarn-": _DIALECT,
    "sgd-": _ADAM,
    "lion-": _ADAM,
    "muon-": _ADAM,
    "cuda-graph-": _CUDA_GRAPHS,
    "moe-paged-stash": _CUDA_GRAPHS,
    "tp-comm-": _USER_BUFFERS,
    "no-tp-comm-": _USER_BUFFERS,
    "disable-tp-comm-": _USER_BUFFERS,
    "flight-recorder-": _FLIGHT_RECORDER,
    "no-flight-recorder-": _FLIGHT_RECORDER,
    "disable-flight-recorder-": _FLIGHT_RECORDER,
    "kitchen-": _KITCHEN,
}
"""How the names of flags begin whose group has others that pass."""

REASONS: Mapping[str, str] = {
    name: reason for names, reason in _NAMES.items() for name in names.split()
}
"""Single flags, without the dashes in front."""

ALLOWED = frozenset(("vocab-size", "ckpt-format"))
"""Flags of refused groups that are ours to set and that a user may give nevertheless."""


def reason_against(option: str, title: str) -> str | None:
    """Why an option of Megatron's group ``title`` is refused; ``None`` when it is not."""
    name = option.removeprefix("--")
    if name in ALLOWED:
        return None
    for prefix, reason in PREFIXES.items():
        if name.startswith(prefix):
            return reason
    return REASONS.get(name) or GROUPS.get(title)


def reasons(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    """Every long option of Megatron's parser with the reason against it."""
    return {
        option: reason_against(option, group.title or "")
        for group in parser._action_groups  # pyright: ignore[reportPrivateUsage]
        for action in group._group_actions  # pyright: ignore[reportPrivateUsage]
        for option in action.option_strings
        if option.startswith("--")
    }
