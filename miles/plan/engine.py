"""An engine's share of a device: weights, key/value cache, and how many tokens that holds."""

from dataclasses import dataclass

from miles.plan.job import Engines, Job
from miles.plan.memory import Line, line

EMBEDDED_SHARE = 0.7
"""Of the memory that is free after loading: ``embedded/engine.py``."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The key/value cache of one engine."""

    bytes: int
    """On each of its devices."""
    tokens: int


def weight_bytes(job: Job, engines: Engines) -> int:
    """On each device of an engine."""
    return engines.dtype_bytes * job.model.num_parameters // engines.gpus


def token_bytes(job: Job, engines: Engines) -> int:
    """Keys and values of one token in all layers, on each device: a head at least."""
    model = job.model
    heads = max(1, -(-model.num_kv_heads // engines.gpus))
    return 2 * len(model.layers) * heads * model.head_dim * engines.dtype_bytes


def cache(job: Job, engines: Engines) -> Cache:
    """SGLang takes the whole share at its start; the embedded engine grows to what is asked."""
    each, weights = token_bytes(job, engines), weight_bytes(job, engines)
    if engines.kind == "sglang":
        assert engines.share is not None
        tokens = int(engines.share * job.device_bytes - weights) // each
    else:
        tokens = int(EMBEDDED_SHARE * (job.device_bytes - weights)) // each
        tokens = min(tokens, engines.rows * job.batch.longest)
    if engines.max_tokens is not None:
        tokens = min(tokens, engines.max_tokens)
    tokens = max(tokens, 0)
    return Cache(bytes=tokens * each, tokens=tokens)


def engine_lines(job: Job, engines: Engines, *, weights: bool, kv_cache: bool) -> list[Line]:
    """What of an engine is on each of its devices."""
    lines: list[Line] = []
    if weights:
        lines.append(line("engine weights", device=weight_bytes(job, engines)))
    if kv_cache:
        found = cache(job, engines)
        lines.append(line(f"key/value cache, {found.tokens:,} tokens", device=found.bytes))
    return lines
