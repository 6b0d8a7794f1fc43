"""Phase by phase, what lies on each kind of device: the forecast of a run."""

from dataclasses import dataclass

from miles.plan import engine, trainer
from miles.plan.job import Engines, Job, Layout
from miles.plan.memory import Bytes, Line, line, total
from miles.plan.residency import StateBytes

CONTEXT_BYTES = 2**29
"""Of one process on a device: CUDA's context and its kernels."""
COMMUNICATOR_BYTES = 2**28
"""Buffers of one NCCL communicator."""
PROCESS_BYTES = 1600 * 2**20
"""Of Python, CUDA and their libraries on the host (docs/memory.md)."""
WRITTEN_STATE = 12
"""Of a parameter in Megatron's checkpoints: its main one and two moments."""
FP32 = 4
SHARED_SEGMENTS = 2
"""Of a weight update between processes on one device: one is filled while the other is read."""

ENGINE = "engine"
"""The place of an engine with devices of its own."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase on one kind of device."""

    name: str
    """rollout, sync, train or save."""
    place: str
    """Which ranks or engines."""
    moment: str
    """When it is fullest; empty where it does not change."""
    lines: tuple[Line, ...]
    device_bytes: int
    """Capacity."""
    host_bytes: int | None
    """Capacity of a machine."""
    processes: int
    """That share a machine's memory."""
    too_short: str = ""
    """Why it does not work though it fits: a cache that holds no whole sample."""

    @property
    def sum(self) -> Bytes:
        return total(self.lines)

    @property
    def excess_device(self) -> int:
        """Bytes too much; 0 where it fits."""
        return max(0, self.sum.device - self.device_bytes)

    @property
    def excess_host(self) -> int:
        """The same of a machine's memory."""
        if self.host_bytes is None:
            return 0
        return max(0, self.sum.host * self.processes - self.host_bytes)

    @property
    def fits(self) -> bool:
        return not (self.excess_device or self.excess_host or self.too_short)


def forecast(job: Job) -> list[Phase]:
    """In the order of a run; ranks of each pipeline stage apart, and engines where they have
    devices of their own."""
    phases: list[Phase] = []
    stages = range(job.layout.pipeline)
    for name, build in (("rollout", _rollout), ("sync", _sync)):
        phases += [_phase(job, name, stage, "", build(job, stage)) for stage in stages]
        if job.engines is not None and not job.engines.colocated:
            phases.append(_engine_phase(job, job.engines, name))
    for stage in stages:
        moment = trainer.fullest_moment(job, stage)
        lines = [*moment.lines, *_resting_engine(job)]
        phases.append(_phase(job, "train", stage, moment.name, lines))
    if job.saving.checkpoint or job.saving.hf:
        phases += [_phase(job, "save", stage, "", _save(job, stage)) for stage in stages]
    return phases


def _phase(job: Job, name: str, stage: int, moment: str, lines: list[Line]) -> Phase:
    layout, engines = job.layout, job.engines
    processes = 1 + (engines is not None and engines.colocated)
    base = [
        line("CUDA contexts", device=processes * CONTEXT_BYTES),
        line("communicators", device=layout.communicators * COMMUNICATOR_BYTES),
        line("Python, CUDA, libraries", host=PROCESS_BYTES),
    ]
    place = "trainer rank"
    if layout.pipeline > 1:
        place = f"trainer rank of stage {stage}"
    generates = name == "rollout" and engines is not None and engines.colocated
    return Phase(
        name=name,
        place=place,
        moment=moment,
        lines=_shown([*lines, *base]),
        device_bytes=job.device_bytes,
        host_bytes=job.host_bytes,
        processes=min(layout.ranks_per_node, layout.ranks),
        too_short=_too_short(job, engines) if generates and engines is not None else "",
    )


def _engine_phase(job: Job, engines: Engines, name: str) -> Phase:
    lines = engine.engine_lines(job, engines, weights=True, kv_cache=True)
    if name == "sync":
        lines.append(line("weight bucket", device=_bucket(job)))
    base = [
        line("CUDA contexts", device=CONTEXT_BYTES),
        line("communicators", device=COMMUNICATOR_BYTES * (1 + (engines.gpus > 1))),
    ]
    return Phase(
        name=name,
        place=ENGINE,
        moment="",
        lines=_shown([*lines, *base]),
        device_bytes=job.device_bytes,
        host_bytes=None,
        processes=1,
        too_short=_too_short(job, engines),
    )


def _too_short(job: Job, engines: Engines) -> str:
    held, longest = engine.cache(job, engines).tokens, job.batch.longest
    if held >= longest:
        return ""
    return f"the key/value cache holds {held:,} tokens, and a sample may have {longest:,}"


def _rollout(job: Job, stage: int) -> list[Line]:
    lines = _trainer_between(job, stage, in_sync=False)
    if job.engines is not None and job.engines.colocated:
        lines += engine.engine_lines(job, job.engines, weights=True, kv_cache=True)
    return lines


def _sync(job: Job, stage: int) -> list[Line]:
    """The trainer sends its parameters: a bucket of them is full when the next tensor is there."""
    lines = _trainer_between(job, stage, in_sync=True)
    engines = job.engines
    if engines is None:
        return lines
    bucket = _bucket(job)
    lines.append(line("weight bucket and a tensor", device=_bucket_and_next(job)))
    if _is_divided(job.layout):
        lines.append(line("pieces of a tensor", device=_largest_tensor(job)))
    if not engines.colocated:
        return lines
    # Where nothing is released, the cache stays.
    keeps = "kv_cache" not in engines.released
    lines += engine.engine_lines(job, engines, weights=True, kv_cache=keeps)
    shared = SHARED_SEGMENTS * bucket
    if engines.kind == "sglang":
        return [*lines, line("shared buckets", device=shared)]
    # On the host, of rank 0 alone.
    return [*lines, line("shared buckets", host=shared // job.layout.ranks_per_node)]


def _trainer_between(job: Job, stage: int, *, in_sync: bool) -> list[Line]:
    held = trainer.state(job, stage)
    return held.asleep(in_sync=in_sync) if job.offload.sleeps else trainer.idle_lines(job, stage)


def _save(job: Job, stage: int) -> list[Line]:
    held = trainer.state(job, stage)
    lines = [*trainer.idle_lines(job, stage), *_resting_engine(job)]
    saving, layout = job.saving, job.layout
    if saving.checkpoint:
        written = _written(job, held)
        if saving.in_background:
            # FSDP's ranks copy what they hold, also where another one writes it.
            is_fsdp = layout.backend == "fsdp"
            copied = held.checkpoint_bytes(optimizer=saving.optimizer) if is_fsdp else written
            lines.append(line("copy for the save", host=copied))
        # An optimizer's are in fp32.
        parts = layout.shards if layout.backend == "fsdp" else layout.tensor
        largest = FP32 * job.model.largest_tensor // parts
        lines.append(line("tensor being written", host=largest))
        lines.append(line("checkpoint", disk=written))
    if saving.hf:
        exported = job.model.dtype_bytes * job.model.num_parameters
        lines += [
            line("gathered tensor", device=_largest_tensor(job)),
            # Rank 0 writes it all.
            line("Hugging Face export", disk=exported // layout.ranks),
        ]
    return lines


def _written(job: Job, held: StateBytes) -> int:
    """A rank's part of a checkpoint."""
    layout, optimizer = job.layout, job.saving.optimizer
    if layout.backend == "fsdp":
        copies = (layout.replicas, layout.replicas)
        return held.checkpoint_bytes(optimizer=optimizer, copies=copies)
    if not job.numbers.distributed_optimizer:
        copies = (layout.shards, layout.shards)
        return held.checkpoint_bytes(optimizer=optimizer, copies=copies)
    # Every rank writes its own part, in fp32 whatever it keeps, and parameters that are fp32 twice.
    return held.checkpoint_bytes(
        optimizer=optimizer, copies=(layout.shards, 1), state_bytes=WRITTEN_STATE
    )


def _resting_engine(job: Job) -> list[Line]:
    """What a colocated engine keeps on the device while the trainer has it."""
    engines = job.engines
    if engines is None or not engines.colocated:
        return []
    return engine.engine_lines(
        job,
        engines,
        weights="weight" not in engines.released,
        kv_cache="kv_cache" not in engines.released,
    )


def _bucket(job: Job) -> int:
    """A tensor that is larger travels alone."""
    return max(min(job.bucket_bytes, _model_bytes(job)), _largest_tensor(job))


def _bucket_and_next(job: Job) -> int:
    """A bucket is sent when the next tensor does not fit into it."""
    held = most = 0
    for numel in job.model.tensors:
        num_bytes = job.model.dtype_bytes * numel
        most = max(most, held + num_bytes)
        held = num_bytes if held + num_bytes > job.bucket_bytes else held + num_bytes
    return most


def _is_divided(layout: Layout) -> bool:
    """Whether ranks hold parts of tensors, which are gathered."""
    if layout.backend == "fsdp":
        return layout.shards > 1
    return layout.tensor > 1 or layout.expert_tensor > 1


def _largest_tensor(job: Job) -> int:
    return job.model.dtype_bytes * job.model.largest_tensor


def _model_bytes(job: Job) -> int:
    return job.model.dtype_bytes * job.model.num_parameters


def _shown(lines: list[Line]) -> tuple[Line, ...]:
    return tuple(entry for entry in lines if entry.bytes != Bytes())
