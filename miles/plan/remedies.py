"""Which flag to turn where something does not fit, the cheapest first: each is the same job with
one number replaced, and what it saves is the difference of two forecasts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from miles.plan.forecast import ENGINE, Phase, forecast
from miles.plan.job import Job, Recompute

LEAST_CHUNK = 128
"""Tokens of a chunk of logits; with fewer, kernels are too small."""
SMALLER_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of --sglang-mem-fraction-static."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One flag, and what it does where the job does not fit."""

    flag: str
    """As on a command line."""
    cost: str
    device: int
    """Bytes that it saves in the phase that has the most too much."""
    host: int
    """The same on a machine's host, of all its ranks."""
    enough: bool
    """Whether the job fits with it alone."""


@dataclass(frozen=True)
class _Option:
    flag: str
    cost: str
    job: Job
    """With the flag."""


def remedies(job: Job) -> list[Remedy]:
    """Those that save something where it is missing; empty where everything fits."""
    before = forecast(job)
    if all(phase.fits for phase in before):
        return []
    found: list[Remedy] = []
    for make in OPTIONS:
        found += [_weigh(option, before) for option in _best(make(job), before)]
    found += [_weigh(option, before) for option in _state_elsewhere(job)]
    found += [_weigh(option, before) for make in LAST for option in _best(make(job), before)]
    return [remedy for remedy in found if remedy.device > 0 or remedy.host > 0 or remedy.enough]


def _best(options: Sequence[_Option], before: Sequence[Phase]) -> list[_Option]:
    """Of the values of one flag the first that is enough, else the last."""
    enough = [option for option in options if _weigh(option, before).enough]
    return enough[:1] or list(options[-1:])


def _weigh(option: _Option, before: Sequence[Phase]) -> Remedy:
    after = forecast(option.job)
    return Remedy(
        flag=option.flag,
        cost=option.cost,
        device=_saved(before, after, lambda p: p.excess_device, lambda p: p.sum.device),
        host=_saved(before, after, lambda p: p.excess_host, lambda p: p.sum.host * p.processes),
        enough=all(phase.fits for phase in after),
    )


def _saved(
    before: Sequence[Phase],
    after: Sequence[Phase],
    excess: Callable[[Phase], int],
    held: Callable[[Phase], int],
) -> int:
    """In the phase that has the most too much; 0 where none has. Of ranks that differ, the fullest
    count on either side."""
    worst = max(before, key=excess)
    if not excess(worst):
        return 0
    engines = worst.place == ENGINE
    same = [p for p in after if p.name == worst.name and (p.place == ENGINE) == engines]
    return held(worst) - max(map(held, same))


def _fewer_tokens(job: Job) -> list[_Option]:
    """Halves of the budget, down to the longest sample; of the rows, down to one."""
    batch, options = job.batch, list[_Option]()
    cost = "more and smaller passes"
    if batch.packed:
        tokens = batch.tokens // 2
        while tokens * job.layout.context >= batch.longest:
            smaller = replace(batch, tokens=tokens, micro_batches=2 * batch.micro_batches)
            options.append(
                _Option(f"--max-tokens-per-gpu {tokens}", cost, replace(job, batch=smaller))
            )
            tokens //= 2
        return options
    rows = batch.tokens * job.layout.context // batch.longest
    while rows > 1:
        rows //= 2
        tokens = rows * batch.longest // job.layout.context
        smaller = replace(batch, tokens=tokens, micro_batches=2 * batch.micro_batches)
        options.append(_Option(f"--micro-batch-size {rows}", cost, replace(job, batch=smaller)))
    return options


def _smaller_chunks(job: Job) -> list[_Option]:
    chunk, options = min(job.head.chunk, job.head.tokens), list[_Option]()
    while chunk // 2 >= LEAST_CHUNK:
        chunk //= 2
        numbers = replace(job.numbers, log_probs_chunk_size=chunk)
        flag = f"--log-probs-chunk-size {chunk}"
        options.append(_Option(flag, "smaller products in the head", replace(job, numbers=numbers)))
    return options


def _sharded_gradients(job: Job) -> list[_Option]:
    numbers, layout = job.numbers, job.layout
    if layout.backend != "fsdp" or numbers.sharded_gradients or job.batch.micro_batches == 1:
        return []
    changed = replace(job, numbers=replace(numbers, sharded_gradients=True))
    cost = "a reduction of gradients for every micro-batch"
    return [_Option("--accumulate-sharded-gradients", cost, changed)]


def _recompute(job: Job) -> list[_Option]:
    if job.recompute.method == "uniform":
        return []
    flag = "--gradient-checkpointing"
    if job.layout.backend == "megatron":
        flag = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    changed = replace(job, recompute=Recompute(method="uniform"))
    return [_Option(flag, "another forward pass", changed)]


def _sequence_parallel(job: Job) -> list[_Option]:
    layout = job.layout
    if layout.tensor == 1 or layout.sequence_parallel:
        return []
    changed = replace(job, layout=replace(layout, sequence_parallel=True))
    return [_Option("--sequence-parallel", "nothing but another order of sums", changed)]


def _smaller_cache(job: Job) -> list[_Option]:
    engines = job.engines
    if engines is None or engines.share is None or not engines.colocated:
        return []
    return [
        _Option(
            f"--sglang-mem-fraction-static {share:g}",
            "fewer responses at a time",
            replace(job, engines=replace(engines, share=share)),
        )
        for share in SMALLER_SHARES
        if share < engines.share
    ]


def _larger_cache(job: Job) -> list[_Option]:
    engines = job.engines
    if engines is None or engines.share is None:
        return []
    return [
        _Option(
            f"--sglang-mem-fraction-static {share:g}",
            "less room for everything else",
            replace(job, engines=replace(engines, share=share)),
        )
        for share in reversed((0.9, *SMALLER_SHARES))
        if share > engines.share
    ]


def _state_elsewhere(job: Job) -> list[_Option]:
    """Where the trainer's state may lie."""
    offload, fsdp = job.offload, job.layout.backend == "fsdp"
    rows = (
        (
            "--optimizer-cpu-offload",
            not fsdp and not offload.optimizer_on_host and not offload.streams,
            replace(offload, optimizer_on_host=1.0),
        ),
        (
            "--offload-train-target disk",
            offload.sleeps and offload.target == "cpu",
            replace(offload, target="disk", rematerializes=False),
        ),
        (
            "--rematerialize-param-from-master-weight",
            offload.sleeps
            and offload.target == "cpu"
            and job.numbers.master > 0
            and not offload.rematerializes,
            replace(offload, rematerializes=True),
        ),
        (
            "--fsdp-cpu-offload",
            fsdp and not offload.on_host and offload.target == "cpu",
            replace(offload, on_host=True),
        ),
        (
            "--offload-train-target disk --stream-optimizer-state-to-disk",
            offload.sleeps
            and not offload.streams
            and not offload.on_host
            and not offload.optimizer_on_host,
            replace(offload, target="disk", streams=True, rematerializes=False),
        ),
    )
    return [
        _Option(flag, "the time of copies in every step", replace(job, offload=changed))
        for flag, applies, changed in rows
        if applies
    ]


def _more_cache_tokens(job: Job) -> list[_Option]:
    engines, longest = job.engines, job.batch.longest
    if engines is None or engines.max_tokens is None or engines.max_tokens >= longest:
        return []
    changed = replace(job, engines=replace(engines, max_tokens=longest))
    return [_Option(f"--sglang-max-total-tokens {longest}", "that memory", changed)]


def _larger_engines(job: Job) -> list[_Option]:
    engines = job.engines
    if engines is None or engines.kind != "sglang":
        return []
    return [
        _Option(
            f"--rollout-num-gpus-per-engine {gpus}",
            "communication in each decoding step",
            replace(job, engines=replace(engines, gpus=gpus)),
        )
        for gpus in (2, 4, 8)
        if gpus > engines.gpus and job.model.num_heads % gpus == 0
    ]


def _release_engines(job: Job) -> list[_Option]:
    engines = job.engines
    everything = frozenset(("kv_cache", "weight"))
    if engines is None or not engines.colocated or engines.released == everything:
        return []
    changed = replace(job, engines=replace(engines, released=everything))
    flag = "--offload-rollout --offload-rollout-level kv_cache weight"
    return [_Option(flag, "seconds between phases", changed)]


def _sleep(job: Job) -> list[_Option]:
    if job.offload.sleeps or job.engines is None or not job.engines.colocated:
        return []
    changed = replace(job, offload=replace(job.offload, sleeps=True))
    return [_Option("--offload-train", "seconds between phases, host memory", changed)]


def _distributed_optimizer(job: Job) -> list[_Option]:
    numbers = job.numbers
    if job.layout.backend == "fsdp" or numbers.distributed_optimizer:
        return []
    changed = replace(job, numbers=replace(numbers, distributed_optimizer=True))
    return [_Option("--use-distributed-optimizer", "a gather of parameters a step", changed)]


def _more_tensor_parallelism(job: Job) -> list[_Option]:
    layout, model = job.layout, job.model
    tensor = 2 * layout.tensor
    inside = tensor * layout.context * layout.pipeline
    divides = model.num_kv_heads % tensor == 0 and model.intermediate_size % tensor == 0
    if layout.backend == "fsdp" or layout.ranks % inside or not divides:
        return []
    if tensor > layout.ranks_per_node or layout.padded_vocab_size % tensor:
        return []
    changed = replace(
        layout,
        tensor=tensor,
        expert_tensor=min(layout.expert_tensor, tensor),
        sequence_parallel=True,
    )
    flag = f"--tensor-model-parallel-size {tensor} --sequence-parallel"
    return [_Option(flag, "communication in each layer", replace(job, layout=changed))]


def _more_ranks(job: Job) -> list[_Option]:
    """Powers of two more machines."""
    layout, options = job.layout, list[_Option]()
    for factor in (2, 4, 8):
        nodes = factor * layout.ranks // layout.ranks_per_node
        changed = replace(layout, ranks=factor * layout.ranks)
        batch = replace(job.batch, micro_batches=max(1, job.batch.micro_batches // factor))
        flag = f"--actor-num-nodes {nodes}"
        options.append(_Option(flag, "more machines", replace(job, layout=changed, batch=batch)))
    return options


OPTIONS: tuple[Callable[[Job], list[_Option]], ...] = (
    _fewer_tokens,
    _smaller_chunks,
    _sequence_parallel,
    _sharded_gradients,
    _recompute,
    _smaller_cache,
    _more_cache_tokens,
    _larger_cache,
    _release_engines,
    _sleep,
    _distributed_optimizer,
)
"""In order of cost: values of one flag each."""

LAST: tuple[Callable[[Job], list[_Option]], ...] = (
    _larger_engines,
    _more_tensor_parallelism,
    _more_ranks,
)
"""What costs more than a copy in every step."""
