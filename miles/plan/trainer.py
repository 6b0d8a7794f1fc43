"""A trainer rank's memory: what it holds between steps, and the fullest moment of a step."""

from dataclasses import dataclass
from itertools import accumulate

from miles.plan import activations
from miles.plan.job import Job
from miles.plan.logits import fused_head_bytes, vocab_parallel_head_bytes
from miles.plan.memory import Line, line, total
from miles.plan.model import Layer
from miles.plan.residency import StateBytes

FP32 = 4
PREFETCHED = 2
"""FSDP2 gathers a layer while the one before it runs."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point of a training step, or of the start."""

    name: str
    lines: list[Line]


def layers_of(job: Job, stage: int) -> tuple[Layer, ...]:
    """The layers of a pipeline stage; FSDP: all."""
    sizes = job.layout.stage_layers
    if not sizes:
        return job.model.layers
    starts = [0, *accumulate(sizes)]
    return job.model.layers[starts[stage] : starts[stage] + sizes[stage]]


def state(job: Job, stage: int) -> StateBytes:
    """The rank's parameters and what belongs to them."""
    numbers, layout = job.numbers, job.layout
    if layout.backend == "fsdp":
        held = optimized = -(-job.model.num_parameters // layout.shards)
    else:
        dense, experts = _megatron_parameters(job, stage)
        held = dense + experts
        optimized = held
        if numbers.distributed_optimizer:
            optimized = -(-dense // layout.shards) - (-experts // layout.expert_shards)
    return StateBytes(
        parameters=held,
        optimized=optimized,
        parameter_bytes=numbers.parameter,
        gradient_bytes=numbers.gradient,
        master_bytes=numbers.master,
        moment_bytes=numbers.moments,
        reference_bytes=numbers.compute if numbers.reference else 0,
        pinned=_pinned_for_each(job) if job.offload.on_host else 1.0,
        offload=job.offload,
    )


def idle_lines(job: Job, stage: int) -> list[Line]:
    """Awake, between steps: Megatron's gradient buffers stay, FSDP's gradients are gone."""
    held = state(job, stage)
    buffers = held.gradients() if job.layout.backend == "megatron" else []
    return [*held.awake(), *buffers]


def fullest_moment(job: Job, stage: int) -> Moment:
    """Of an optimizer step, or of the start where that is more: that with the most bytes on the
    device."""
    moments = _fsdp_moments(job) if job.layout.backend == "fsdp" else _megatron_moments(job, stage)
    return max(moments, key=lambda moment: total(moment.lines).device)


def _pinned_for_each(job: Job) -> float:
    """Bytes of pinned memory for each byte of a shard: PyTorch takes the next power of two."""
    shards = [-(-numel // job.layout.shards) for numel in job.model.tensors]
    return sum(1 << (numel - 1).bit_length() for numel in shards) / sum(shards)


def _megatron_parameters(job: Job, stage: int) -> tuple[int, int]:
    """Of a rank: dense ones, and experts."""
    model, layout = job.model, job.layout
    layers = layers_of(job, stage)
    dense = sum(layer.matrices // layout.tensor + layer.replicated for layer in layers)
    experts = sum(layer.experts for layer in layers) // (layout.expert * layout.expert_tensor)
    vocabulary = layout.padded_vocab_size * model.hidden_size // layout.tensor
    if stage == 0:
        dense += vocabulary
    if stage == layout.pipeline - 1:
        # A tied head is the embedding itself only where both are on one stage.
        own_head = model.head > 0 or layout.pipeline > 1
        dense += (vocabulary if own_head else 0) + model.others
    return dense, experts


def _fsdp_moments(job: Job) -> list[Moment]:
    model, compute = job.model, job.numbers.compute
    held = state(job, 0)
    # The root keeps its parameters gathered between the passes; an untied embedding is not its.
    root = compute * (model.others + (model.head or model.embedding))
    layer = compute * model.largest_layer
    # Of the micro-batches before this one; reduced at the end, they are whole and fp32 till then.
    whole = [line("gradients", device=FP32 * model.num_parameters)]
    gradients = held.gradients() if job.numbers.sharded_gradients else whole
    so_far = gradients if job.batch.micro_batches > 1 else []
    kept, working = _activations(job, model.layers)
    final = int(activations.final_bytes(model, job.axes) * job.batch.tokens)
    reduced = FP32 * model.largest_layer + layer
    return [
        Moment(
            name="backward pass of the head",
            lines=[
                *held.awake(),
                *so_far,
                line("activations", device=kept + final),
                line("logits", device=fused_head_bytes(job.head)),
                line("gathered parameters", device=root + layer),
            ],
        ),
        Moment(
            name="backward pass of a layer",
            lines=[
                *held.awake(),
                *so_far,
                line("activations", device=kept + working),
                line("gathered parameters", device=root + PREFETCHED * layer),
                line("gradients not reduced yet", device=root + reduced),
            ],
        ),
        Moment(
            name="end of the backward pass",
            lines=[
                *held.awake(),
                *(so_far or held.gradients()),
                line("gathered parameters", device=root + layer),
                line("gradients not reduced yet", device=root + reduced),
            ],
        ),
        Moment(
            name="optimizer step",
            lines=[*held.awake(), *held.gradients(), *held.buckets()],
        ),
    ]


def _megatron_moments(job: Job, stage: int) -> list[Moment]:
    layout, held = job.layout, state(job, stage)
    layers = layers_of(job, stage)
    kept, working = _activations(job, layers)
    kept = int(kept * _in_flight(job, stage))
    buffers = held.gradients()
    # Autograd makes a weight's gradient before it is added to its buffer.
    matrix = job.numbers.compute * 2 * job.model.intermediate_size * job.model.hidden_size
    moments = [
        Moment(
            name="backward pass of a layer",
            lines=[
                *held.awake(),
                *buffers,
                line("activations", device=kept + working),
                line("gradients not added yet", device=matrix // layout.tensor),
            ],
        ),
        Moment(name="optimizer step", lines=[*held.awake(), *buffers, *held.buckets()]),
    ]
    if job.numbers.distributed_optimizer:
        # Each buffer is made whole before its parameters move in; nothing else is there yet.
        parameters = job.numbers.parameter * held.parameters
        twice = [line("parameters", device=parameters), line("their buffers", device=parameters)]
        moments.append(Moment(name="start of the run", lines=[*twice, *buffers]))
    if stage < layout.pipeline - 1:
        return moments
    final = int(activations.final_bytes(job.model, job.axes) * job.batch.tokens)
    head = Moment(
        name="backward pass of the head",
        lines=[
            *held.awake(),
            *buffers,
            line("activations", device=kept + final),
            line("logits", device=vocab_parallel_head_bytes(job.head)),
        ],
    )
    return [head, *moments]


def _activations(job: Job, layers: tuple[Layer, ...]) -> tuple[int, int]:
    """Bytes that one micro-batch keeps from its forward pass, and those that a layer's backward
    pass adds."""
    model, axes, recompute = job.model, job.axes, job.recompute
    whole = [activations.layer_bytes(model, layer, axes) for layer in layers]
    working = activations.working_bytes(model, axes)
    if job.layout.sequence_parallel:
        # A layer's input is gathered for its weights' gradients.
        working += job.numbers.compute * model.hidden_size
    if recompute.mlp:
        parts = [activations.mlp_bytes(model, layer, axes) for layer in layers]
        kept = sum(whole) - sum(parts)
        working += max(parts, default=0.0)
    elif recompute.method == "none":
        kept = sum(whole)
    else:
        size = recompute.num_layers
        single = activations.input_bytes(model, axes)
        if recompute.method == "uniform":
            kept = single * -(-len(whole) // size)
            working += max(
                (sum(whole[i : i + size]) for i in range(0, len(whole), size)), default=0
            )
        else:
            kept = single * min(size, len(whole)) + sum(whole[size:])
            working += max(whole[:size], default=0.0)
    return int(kept * job.batch.tokens), int(working * job.batch.tokens)


def _in_flight(job: Job, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at a time: one forward pass for each stage
    behind it before its first backward pass (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    layout, coming = job.layout, job.batch.micro_batches
    behind = layout.pipeline - 1 - stage
    if layout.virtual == 1:
        return min(behind + 1, coming)
    chunks = 2 * behind + (layout.virtual - 1) * layout.pipeline + 1
    return min(chunks / layout.virtual, coming)
