"""What a forecast needs to know of a run, as plain numbers: a remedy is one of them replaced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles.plan.activations import Axes, Modules
from miles.plan.logits import Head
from miles.plan.model import Model
from miles.plan.residency import Offload


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the trainer's ranks divide model and batch."""

    backend: Literal["fsdp", "megatron"]
    ranks: int
    ranks_per_node: int
    replicas: int = 1
    """--dp-replicate-size."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty under FSDP."""
    virtual: int = 1
    """Chunks of a stage."""
    padded_vocab_size: int = 0

    @property
    def pipeline(self) -> int:
        return max(1, len(self.stage_layers))

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks that divide what data parallelism shards."""
        if self.backend == "fsdp":
            return self.ranks // self.replicas
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """The same of experts."""
        if self.backend == "fsdp":
            return self.shards
        return self.ranks // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def communicators(self) -> int:
        """Groups of more than one rank over which the device communicates."""
        if self.backend == "fsdp":
            return sum(size > 1 for size in (self.shards, self.replicas))
        sizes = (self.tensor, self.pipeline, self.context, self.data, self.expert)
        return sum(size > 1 for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The largest micro-batch that may come."""

    tokens: int
    """On one rank."""
    micro_batches: int
    """Of an optimizer step on one rank, at most."""
    longest: int
    """Tokens of the longest sample."""
    packed: bool
    """--use-dynamic-batch-size; else padded rows of ``longest``."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations the backward pass computes again."""

    method: Literal["none", "uniform", "block"] = "none"
    num_layers: int = 1
    """uniform: of a group, of which the first input is kept; block: how many are recomputed."""
    mlp: bool = False
    """Megatron's selective recomputation of the MLP or of the experts."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes of the trainer's numbers."""

    compute: int = 2
    parameter: int = 4
    """As stored: under FSDP of the shards."""
    gradient: int = 4
    master: int = 0
    moments: int = 8
    distributed_optimizer: bool = True
    sharded_gradients: bool = False
    """--accumulate-sharded-gradients."""
    reference: bool = False
    entropy: bool = False
    entropy_gradient: bool = False
    log_probs_chunk_size: int = -1


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The engines of the run that are on its devices."""

    kind: Literal["sglang", "embedded"]
    gpus: int
    """Of one engine."""
    dtype_bytes: int = 2
    colocated: bool = False
    share: float | None = None
    """Of the device, for weights and key/value cache; embedded: none."""
    max_tokens: int | None = None
    """--sglang-max-total-tokens."""
    rows: int = 256
    """Sequences that decode at once."""
    released: frozenset[str] = field(default_factory=frozenset[str])
    """Of ``weight`` and ``kv_cache``: what leaves the device while the trainer trains."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a checkpoint holds."""

    checkpoint: bool = False
    optimizer: bool = True
    in_background: bool = False
    hf: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run."""

    model: Model
    layout: Layout
    batch: Batch
    modules: Modules = "transformers"
    numbers: Numbers = field(default_factory=Numbers)
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    engines: Engines | None = None
    saving: Saving = field(default_factory=Saving)
    bucket_bytes: int = 512 * 2**20
    eager_attention: bool = False
    device_bytes: int
    """Of one device."""
    host_bytes: int | None = None
    """Of one machine."""
    notes: Sequence[str] = ()
    """What the numbers leave out."""

    @property
    def axes(self) -> Axes:
        layout = self.layout
        keys = self.batch.tokens if self.batch.packed else self.batch.longest
        return Axes(
            modules=self.modules,
            compute_bytes=self.numbers.compute,
            tensor=layout.tensor,
            sequence=layout.tensor if layout.sequence_parallel else 1,
            context=layout.context,
            expert_tensor=layout.expert_tensor,
            scores=keys if self.eager_attention else 0,
        )

    @property
    def head(self) -> Head:
        numbers, layout = self.numbers, self.layout
        megatron = layout.backend == "megatron"
        rows = layout.padded_vocab_size // layout.tensor if megatron else self.model.vocab_size
        return Head(
            tokens=self.batch.tokens,
            rows=rows,
            hidden_size=self.model.hidden_size,
            compute_bytes=numbers.compute,
            chunk_size=numbers.log_probs_chunk_size,
            entropy=numbers.entropy,
            entropy_gradient=numbers.entropy_gradient,
        )
