"""From a command line's config to the numbers of a forecast."""

import argparse
from collections.abc import Mapping
from typing import Any

from miles.backends.megatron_utils import arguments as megatron_arguments
from miles.backends.sglang_utils.arguments import MAX_COLOCATED_MEMORY
from miles.config.derived import (
    is_supervised,
    needs_engines,
    needs_reference,
    token_budget,
)
from miles.config.root import MilesConfig
from miles.plan.job import (
    Batch,
    Engines,
    Job,
    Layout,
    Numbers,
    Recompute,
    Saving,
)
from miles.plan.model import COUNTED, Model, read_model
from miles.plan.residency import Offload

SHARE_OF_SGLANG = 0.88
"""About what SGLang's servers take of a large device by default."""
ASSUMED_PROMPT = 1024
"""Tokens of a prompt that no flag bounds."""
DEFAULT_ROWS = 256
"""Sequences that an engine decodes at once."""

_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def read_job(config: MilesConfig, *, device_bytes: int, host_bytes: int | None) -> Job:
    """Of a resolved config that passed its checks. Imports torch, and Megatron for its runs.

    Raises ``ConfigError``, ``OSError`` or ``ValueError`` for a model that cannot be made.
    """
    assert config.rollout.hf_checkpoint is not None, "--hf-checkpoint"
    model = read_model(config.rollout.hf_checkpoint)
    args = None
    if config.cluster.train_backend == "megatron":
        args = megatron_arguments.described(config)
    notes: list[str] = []
    layout = _fsdp_layout(config) if args is None else _megatron_layout(config, args, model, notes)
    if model.model_type not in COUNTED:
        notes.append(
            f"activations of {model.model_type!r} are taken for those of dense decoder layers "
            f"(counted tensor by tensor: {', '.join(COUNTED)})"
        )
    eager = config.fsdp.attn_implementation == "eager"
    modules = "transformers"
    if args is not None:
        modules = "local" if args.transformer_impl == "local" else "transformer_engine"
        if modules == "transformer_engine":
            notes.append("layers of Transformer Engine are counted, not compared with a run")
    return Job(
        model=model,
        layout=layout,
        batch=_batch(config, layout, model, notes),
        modules=modules,
        numbers=_fsdp_numbers(config, model) if args is None else _megatron_numbers(config, args),
        recompute=_fsdp_recompute(config) if args is None else _megatron_recompute(args, notes),
        offload=_offload(config, args),
        engines=_engines(config, model, notes),
        saving=Saving(
            checkpoint=config.checkpoint.save is not None,
            optimizer=not config.checkpoint.no_save_optim,
            in_background=config.checkpoint.async_save,
            hf=config.checkpoint.save_hf is not None,
        ),
        bucket_bytes=config.weight_sync.update_weight_buffer_size,
        eager_attention=args is None and eager,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        notes=tuple(notes),
    )


def _fsdp_layout(config: MilesConfig) -> Layout:
    cluster = config.cluster
    return Layout(
        backend="fsdp",
        ranks=cluster.num_train_ranks,
        ranks_per_node=cluster.actor_num_gpus_per_node,
        replicas=config.fsdp.dp_replicate_size,
    )


def _megatron_layout(
    config: MilesConfig, args: argparse.Namespace, model: Model, notes: list[str]
) -> Layout:
    cluster = config.cluster
    return Layout(
        backend="megatron",
        ranks=cluster.num_train_ranks,
        ranks_per_node=cluster.actor_num_gpus_per_node,
        tensor=args.tensor_model_parallel_size,
        context=cluster.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel),
        stage_layers=stage_layers(args, len(model.layers), notes),
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        padded_vocab_size=args.padded_vocab_size,
    )


def stage_layers(args: argparse.Namespace, num_layers: int, notes: list[str]) -> tuple[int, ...]:
    """Layers of each pipeline stage by Megatron's flags."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        notes.append("--pipeline-model-parallel-layout is counted as equal stages")
        return _equal(num_layers, stages)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        middle = _equal(
            num_layers - (first or 0) - (last or 0),
            stages - (first is not None) - (last is not None),
        )
        ends = [() if size is None else (size,) for size in (first, last)]
        return (*ends[0], *middle, *ends[1])
    embedding = bool(args.account_for_embedding_in_pipeline_split)
    loss = bool(args.account_for_loss_in_pipeline_split)
    sizes = list(_equal(num_layers + embedding + loss, stages))
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)


def _equal(total: int, parts: int) -> tuple[int, ...]:
    if parts == 0:
        return ()
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def _batch(config: MilesConfig, layout: Layout, model: Model, notes: list[str]) -> Batch:
    data, budget = config.data, token_budget(config)
    longest = _longest(config, model, notes)
    step = data.global_batch_size or (data.rollout_batch_size or 1) * data.n_samples_per_prompt
    samples = max(1, -(-step // layout.data))
    if budget is not None:
        return Batch(
            tokens=budget // layout.context,
            micro_batches=max(1, min(samples, -(-samples * longest // budget))),
            longest=min(longest, budget),
            packed=True,
        )
    return Batch(
        tokens=min(data.micro_batch_size, samples) * longest // layout.context,
        micro_batches=-(-samples // data.micro_batch_size),
        longest=longest,
        packed=False,
    )


def _longest(config: MilesConfig, model: Model, notes: list[str]) -> int:
    """Tokens of the longest sample, as far as flags and model bound it."""
    rollout, positions = config.rollout, model.positions
    bounds = [rollout.rollout_max_context_len, rollout.sglang_context_length, positions]
    bound = min((length for length in bounds if length is not None), default=None)
    response, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len
    if response is None or is_supervised(config):
        budget = token_budget(config)
        length = bound if budget is None or bound is None else min(bound, budget)
        if length is None:
            notes.append("nothing bounds a sample: --rollout-max-context-len would")
            return budget or ASSUMED_PROMPT
        return length
    if prompt is None and rollout.rollout_max_context_len is None:
        notes.append(
            f"prompts are taken to have at most {ASSUMED_PROMPT:,} tokens: "
            "--rollout-max-prompt-len says how many"
        )
        prompt = ASSUMED_PROMPT
    length = response + (prompt if prompt is not None else bound or 0)
    return length if bound is None else min(length, bound)


def _fsdp_numbers(config: MilesConfig, model: Model) -> Numbers:
    stored = 4 if config.fsdp.keep_fp32_master else model.dtype_bytes
    return Numbers(
        compute=4 if config.precision.fp32 else 2,
        parameter=stored,
        gradient=stored,
        moments=2 * stored,
        sharded_gradients=config.fsdp.accumulate_sharded_gradients,
        reference=needs_reference(config),
        **_loss(config),
    )


def _loss(config: MilesConfig) -> dict[str, Any]:
    algorithm = config.algorithm
    trained = algorithm.entropy_coef != 0
    return {
        "entropy": trained or algorithm.observe_training_entropy,
        "entropy_gradient": trained,
        "log_probs_chunk_size": algorithm.log_probs_chunk_size,
    }


def _megatron_numbers(config: MilesConfig, args: argparse.Namespace) -> Numbers:
    fp32 = config.precision.fp32
    compute = 4 if fp32 else 2
    wide = fp32 or args.accumulate_allreduce_grads_in_fp32
    master, moments = 0 if fp32 else 4, 8
    if args.use_precision_aware_optimizer:
        master = args.main_params_dtype.itemsize
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    return Numbers(
        compute=compute,
        parameter=compute,
        gradient=4 if wide else compute,
        master=master,
        moments=moments,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        reference=needs_reference(config),
        **_loss(config),
    )


def _offload(config: MilesConfig, args: argparse.Namespace | None) -> Offload:
    options = config.offload
    on_host = args is not None and args.optimizer_cpu_offload
    return Offload(
        # Without engines there is nobody to make room for.
        sleeps=bool(options.offload_train) and needs_engines(config),
        target=options.offload_train_target,
        chunk_bytes=options.offload_train_disk_chunk_mb << 20,
        streams=options.stream_optimizer_state_to_disk,
        streamed_moment_bytes=4 if options.stream_optimizer_state_moment_dtype == "bf16" else 8,
        rematerializes=options.rematerialize_param_from_master_weight,
        on_host=config.fsdp.fsdp_cpu_offload,
        optimizer_on_host=args.optimizer_offload_fraction if args and on_host else 0.0,
    )


def _fsdp_recompute(config: MilesConfig) -> Recompute:
    return Recompute(method="uniform" if config.fsdp.gradient_checkpointing else "none")


def _megatron_recompute(args: argparse.Namespace, notes: list[str]) -> Recompute:
    if args.recompute_granularity == "full":
        return Recompute(method=args.recompute_method, num_layers=args.recompute_num_layers or 1)
    if args.recompute_granularity is None:
        return Recompute()
    modules = set(args.recompute_modules or ())
    others = modules - {"core_attn", "mlp", "moe"}
    if others:
        names = ", ".join(sorted(others))
        notes.append(f"--recompute-modules: what {names} saves is not counted")
    return Recompute(mlp=bool(modules & {"mlp", "moe"}))


def _engines(config: MilesConfig, model: Model, notes: list[str]) -> Engines | None:
    rollout, cluster = config.rollout, config.cluster
    if rollout.rollout_external or not needs_engines(config):
        return None
    embedded = rollout.rollout_engine == "embedded" or rollout.deterministic_rollout
    share = None
    if not embedded:
        share = rollout.sglang_mem_fraction_static
        if share is None:
            share = MAX_COLOCATED_MEMORY if cluster.colocate else SHARE_OF_SGLANG
    if rollout.rollout_engine == "auto" and not embedded:
        notes.append("--rollout-engine auto is taken for SGLang")
    rows = min(
        rollout.sglang_max_running_requests or DEFAULT_ROWS, rollout.sglang_server_concurrency
    )
    released = config.offload.offload_rollout_level if config.offload.offload_rollout else ()
    return Engines(
        kind="embedded" if embedded else "sglang",
        gpus=cluster.rollout_num_gpus_per_engine,
        dtype_bytes=_engine_dtype_bytes(config, model, _DTYPE_BYTES),
        colocated=cluster.colocate,
        share=share,
        max_tokens=rollout.sglang_max_total_tokens,
        rows=rows,
        released=frozenset(released),
    )


def _engine_dtype_bytes(config: MilesConfig, model: Model, known: Mapping[str, int]) -> int:
    if config.rollout.sglang_dtype != "auto":
        return known[config.rollout.sglang_dtype]
    return 2 if config.precision.fp16 else model.dtype_bytes
