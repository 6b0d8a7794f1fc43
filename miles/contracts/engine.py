"""The engine protocol as types: requests, results, weight references, memory tags.

The wire format behind it is SGLang's HTTP protocol; ``rollout/engine_client.py`` is the only code
that speaks it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from miles.contracts.types import TensorSpec

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
PauseMode = Literal["abort", "retract", "in_place"]
FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """An engine refused or failed a call. The message names the engine, the call and its answer."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. Log-probs are of logits / temperature, before top-p and top-k."""

    temperature: float = 1.0
    """0 means greedy (log-probs then at temperature 1)."""
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    ignore_eos: bool = False
    sampling_seeds: tuple[int, ...] | None = None
    """One for each of the n samples (``--deterministic-rollout``); ``None``: unseeded."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt, ``n`` continuations; the prompt is prefilled once."""

    input_ids: Sequence[int]
    params: SamplingParams
    n: int = 1
    rid: str | None = None
    """Request id, for aborting it."""
    admission: tuple[str, int, int] | None = None
    """``(rollout key, position, count)`` under ``--deterministic-rollout``: the embedded engine
    starts no step before all ``count`` requests of the key are there, and admits in order."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation."""

    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """As long as ``output_ids``; NaN where the engine gave null."""
    text: str
    finish_reason: FinishReason
    weight_version: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ShmRef:
    """A bucket in POSIX shared memory (``load_format: "shm_bucket"``)."""

    shm_name: str
    num_bytes: int
    entries: tuple[tuple[TensorSpec, int], ...]
    """Each tensor and its byte offset."""


@dataclass(frozen=True, kw_only=True)
class GroupRef:
    """A bucket that is broadcast, tensor by tensor in order, on a process group."""

    group_name: str
    entries: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class FlattenedRef:
    """A bucket as SGLang serializes one (``load_format: "flattened_bucket"``): handles of a shared
    tensor, which are good for one load by one engine."""

    serialized: tuple[str, ...]
    """One for each tensor-parallel rank of the engine."""


WeightRef = ShmRef | FlattenedRef | GroupRef
"""What an engine can load from (closed union; RDMA and disk join it)."""

WeightFormat = Literal["shm_bucket", "flattened_bucket"]
"""How a bucket reaches an engine on the trainer's machine."""


@dataclass(frozen=True, kw_only=True)
class EngineFeatures:
    """What differs between engine servers, as they say themselves."""

    weight_format: WeightFormat
    dtype: str
    """Of the parameters: the name of a torch dtype."""
    checksums: Literal["tensors", "fused"]
    """What ``weight_checksums`` is of: xxh3-128 hex digests (C order) of the checkpoint's tensors,
    or SGLang's own of its parameters, see ``miles/weight_sync/fused.py``; of an engine of several
    tensor-parallel ranks each has its own (``on_rank``)."""


def on_rank(parameter: str, rank: int, num_ranks: int) -> str:
    """The name of a parameter's checksum on one of an engine's ranks."""
    return parameter if num_ranks == 1 else f"{parameter} of rank {rank}"


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """A process group that joins the trainer's source (rank 0) with engines."""

    name: str
    master_address: str
    master_port: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class EngineSet(Protocol):
    """The engines of a job as one trainer rank sees them: blocking calls to all of them.

    Every call raises ``EngineError`` when any engine fails it. ``submit_load`` returns at once
    (broadcast needs the engines to be receiving before it sends).
    """

    @property
    def urls(self) -> tuple[str, ...]: ...
    @property
    def generation(self) -> int:
        """Changes when an engine was replaced, so that transports reconnect."""
        ...

    @property
    def newcomers(self) -> tuple[int, ...] | None:
        """``None``: these are all engines of the job. Else they are those that have not its weights
        yet, at these positions among all: they get the weights, and the version, that the others
        have and generate with meanwhile."""
        ...

    @property
    def gpus_per_engine(self) -> int: ...
    def features(self) -> EngineFeatures:
        """Those that all engines have; engines of a job do not differ."""
        ...

    def pause(self, mode: PauseMode) -> None: ...
    def flush_cache(self, *, unless_busy: bool = False) -> None:
        """Forget the keys and values of all prompts. An engine with requests in flight refuses:
        with ``unless_busy`` that is no failure."""
        ...

    def begin_weight_update(self) -> None:
        """Open an update where the server has such a session; else nothing."""
        ...

    def submit_load(
        self, ref: WeightRef, version: int, *, engine: int | None = None
    ) -> "Future[None]":
        """Ask all engines (or the one at that position) to load; the future fails with
        ``EngineError``. The version is what the engine reports once the update has ended."""
        ...

    def end_weight_update(self, version: int) -> None: ...
    def resume(self) -> None: ...
    def init_weight_group(self, group: WeightGroup) -> "Future[None]":
        """Engine i joins with rank ``1 + i * gpus_per_engine``."""
        ...

    def destroy_weight_group(self, name: str) -> None: ...
    def weight_checksums(self) -> Sequence[Mapping[str, str]]:
        """For each engine, name -> digest of what it loaded, as its features say."""
        ...
