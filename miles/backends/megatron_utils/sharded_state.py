"""Between a trainer's objects and a torch_dist directory: what it holds under which names.

The content is that of ``megatron.training.checkpointing``, so that Megatron-LM and its tools read
it; the optimizer is stored in model space, which any other layout of ranks can read.
"""

import copy
import io
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import generate_state_dict, get_rng_state
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from miles.backends.megatron_utils import optimizer_shards
from miles.backends.megatron_utils.optimizer_shards import GATHERED, SHARDING, Shard
from miles.backends.training_utils import dcp_writing

_REF = "ref."
"""Prefix of a reference's tensors."""
_NOT_THE_MODEL = ("optimizer.", "chained_", _REF, "rng_state", "rerun_state_machine")
_OF_EXPERTS = ".experts."
"""In the names of tensors that expert parallelism divides: other data-parallel groups have them."""
_ENGINE_STATE = "_extra_state"
"""What Transformer Engine's layers add, which local ones do not have; empty without fp8."""


class Misfit(ValueError):
    """A step of another model; the message names parameters."""


class _Planner(dcp_writing.OneCopyPlanner, MCoreSavePlanner):
    """Megatron's, whose objects are pickled already."""


class _Object(io.BytesIO):
    """A pickled value that hands out no view of itself: when a write fails, views end up in cycles
    of tracebacks, and there CPython's collector crashes on them (in 3.12.1)."""

    def getbuffer(self) -> Any:
        return self.getvalue()


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint is made of, or is read into, on this rank."""

    args: Namespace
    """Megatron's arguments."""
    chunks: Sequence[nn.Module]
    """The policy's pipeline chunks, wrapped or not."""
    optimizer: Any | None = None
    """A ``MegatronOptimizer``; ``None`` leaves it out."""
    scheduler: Any | None = None
    """What has ``state_dict`` and ``load_state_dict`` of plain values."""
    ref: Sequence[nn.Module] | None = None
    """Chunks of a reference that differs from the one that the job starts with."""


@dataclass(frozen=True)
class Collected:
    """What a rank has for a checkpoint; nothing of it is copied."""

    state_dict: dict[str, Any]
    """Megatron's, of sharded tensors."""
    shards: Sequence[Shard]
    """The states of parameters that a distributed optimizer holds here."""


def collect(state: TrainerState, iteration: int) -> Collected:
    """What the ranks hold. Collective."""
    if state.optimizer is not None:
        _fill_moments(state.optimizer)
    content = _content(state.args)
    args = _as_torch_dist(state.args, no_save_optim=state.optimizer is None)
    groups: list[Any] = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]
    rng = get_rng_state(args.ckpt_format, *groups)
    collected = _generate(state, content, iteration=iteration, rng_state=rng)
    collected.state_dict.update({"args": args, "content_metadata": content})
    if state.ref is not None:
        collected.state_dict["ref"] = _reference(state.ref, content)
    return collected


def writable(collected: Collected, *, copied: bool, validate: bool) -> dict[str, Any]:
    """What this rank writes, by its name in the checkpoint; ``copied``: as a copy in host memory.

    Collective when it is to ``validate`` that every part of every tensor is written exactly once.
    """
    split: Any = save_preprocess(collected.state_dict, validate, lambda _: {})
    sharded, common = split
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), dist.get_rank())
    by_name: dict[str, list[Any]] = {}
    for leaf in _written_here(nested_values(sharded)):
        if copied and isinstance(leaf, ShardedTensor):
            live: Any = leaf.data
            leaf.data = live.detach().to("cpu", copy=True)
        name = leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key
        by_name.setdefault(name, []).append(leaf)
    named = mcore_to_pyt_state_dict(by_name)
    objects = {
        name: _Object(value.getvalue()) if isinstance(value, io.BytesIO) else value
        for name, value in named.items()
    }
    return objects | optimizer_shards.writable(collected.shards, copied=copied)


def write(directory: Path, tensors: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Write what ``writable`` returned; collective over ``group``, which holds all ranks."""
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_writing.write(directory, tensors, group, planner)


def read(step: Path, state: TrainerState) -> None:
    """Fill all that ``state`` names from the step; collective.

    Raises ``Misfit`` or a ``CheckpointException`` around Megatron's error, perhaps on one rank
    alone, when the step is not of this model, ``ForeignState`` when its optimizer state is not
    that of its weights, and any other error when it cannot be read.
    """
    common = dist_checkpointing.load_common_state_dict(step)
    _check_vocabulary(common, state.args)
    content = common.get("content_metadata") or {}
    collected = _generate(state, content, is_loading=True)
    wanted, shards = collected.state_dict, collected.shards
    if state.ref is not None:
        wanted["ref"] = _reference(state.ref, content)
    _check_stored(step, wanted, optimizer_shards.names(shards))
    answer: Any = dist_checkpointing.load(wanted, str(step), strict=StrictHandling.RETURN_ALL)
    loaded, left_over, absent = answer
    _check_names(left_over, absent)
    _load_chunks(state.chunks, loaded)
    if state.ref is not None:
        _load_chunks(state.ref, loaded["ref"])
    if state.optimizer is not None and not state.optimizer.is_stub_optimizer:
        saved = _with_own_settings(state.optimizer, loaded["optimizer"])
        if shards:
            saved = [optimizer_shards.without_states(part) for part in saved]
        state.optimizer.load_state_dict(dict(enumerate(saved)) if len(saved) > 1 else saved[0])
        optimizer_shards.read(step, shards)
        optimizer_shards.check_owners(shards, state.chunks)
    if state.scheduler is not None and "opt_param_scheduler" in loaded:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])


def _written_here(leaves: Iterable[Any]) -> Iterator[Any]:
    """Those that this rank writes. The ranks of a data-parallel group hold the same tensors in the
    same order: the next one goes to whoever has the fewest bytes so far."""
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    loads = {False: [0] * dense, True: [0] * parallel_state.get_expert_data_parallel_world_size()}
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor):
            if is_main_replica(leaf.replica_id):
                yield leaf
            continue
        assert isinstance(leaf.replica_id, tuple), leaf
        *others, rank = leaf.replica_id
        if any(others):
            continue  # Another model-parallel rank has it too, and comes first.
        load = loads[_OF_EXPERTS in leaf.key]
        writer = load.index(min(load))
        load[writer] += leaf.data.nbytes if leaf.data is not None else 0
        if writer == rank:
            yield leaf


def share_parameters(chunks: Sequence[nn.Module]) -> None:
    """Give every rank the parameters that another one's optimizer holds. Collective.

    Parameters in fp32 are their own main ones: a rank reads those of its part exactly, and the
    others as the weights of the step, which a bf16 run has rounded.
    """
    for chunk in chunks:
        wrapped: Any = chunk
        if wrapped.ddp_config.use_distributed_optimizer:
            wrapped.start_param_sync(force_sync=True)


def _fill_moments(optimizer: Any) -> None:
    """Before its first step an optimizer has none, and what lacks them could not be read."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


def _content(args: Namespace) -> dict[str, Any]:
    """How the tensors lie in the directory: Megatron reads it back before anything else."""
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.spec is not None:
        # Its layers may differ: each is stored under its own number, not as part of a stack.
        content["non_homogeneous_layers"] = True
    if args.use_distributed_optimizer:
        content[SHARDING] = GATHERED
    return content


def _generate(
    state: TrainerState,
    content: Mapping[str, Any],
    *,
    is_loading: bool = False,
    iteration: int | None = None,
    rng_state: Any = None,
) -> Collected:
    metadata = _with_group(content)
    optimizer_options: dict[str, Any] = {"metadata": metadata}
    if is_loading:
        optimizer_options["is_loading"] = True
    parts = () if state.optimizer is None else state.optimizer.chained_optimizers
    with optimizer_shards.left_in_place(parts) as shards:
        state_dict = generate_state_dict(
            _as_torch_dist(state.args, no_save_optim=False),
            unwrap_model(list(state.chunks)),
            state.optimizer,
            state.scheduler,
            rng_state,
            iteration=iteration,
            optim_sd_kwargs=optimizer_options,
            model_sd_kwargs={"metadata": metadata},
        )
    return Collected(state_dict, shards)


def _reference(chunks: Sequence[nn.Module], content: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        name: chunk.sharded_state_dict(metadata=_with_group(content))
        for name, chunk in _named(chunks).items()
    }
    add_prefix_for_sharding(named, _REF)
    return named


def _load_chunks(chunks: Sequence[nn.Module], loaded: Mapping[str, Any]) -> None:
    for name, chunk in _named(chunks).items():
        result = chunk.load_state_dict(loaded[name], strict=False)
        wrong = [
            key
            for key in (*result.missing_keys, *result.unexpected_keys)
            if not key.endswith(_ENGINE_STATE)
        ]
        if wrong:
            raise Misfit(f"{len(wrong)} tensors do not fit: {', '.join(wrong[:3])}")


def _named(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Chunks under the names that Megatron gives them in a checkpoint."""
    models = unwrap_model(list(chunks))
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{index}": model for index, model in enumerate(models)}


def _with_own_settings(optimizer: Any, loaded: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The state of each part. A run goes on with its own flags: of the saved parameter groups it
    takes the step count.

    Megatron would take all of them, and refuses groups whose learning rate is another. It also has
    one optimizer or two, the second for experts, depending on the layout.
    """
    holders = [loaded, *(value for key, value in loaded.items() if isinstance(key, int))]
    saved = [group for holder in holders for group in _param_groups(holder)]
    steps = {group["step"] for group in saved if "step" in group}
    if len(steps) > 1:
        raise ValueError(f"the parts of its optimizer took {sorted(steps)} steps")
    counted = {"step": steps.pop()} if steps else {}
    shared = {
        key: holder[key]
        for holder in holders
        for key in ("grad_scaler", "param_state_sharding_type")
        if key in holder
    }
    wrapped = any("optimizer" in holder for holder in holders)
    parts = optimizer.chained_optimizers
    own: list[dict[Any, Any]] = []
    for number, part in enumerate(parts):
        state = loaded.get(number, {}) if len(parts) > 1 else loaded
        state = {key: value for key, value in state.items() if not isinstance(key, int)} | shared
        inner = state.setdefault("optimizer", {}) if wrapped else state
        # Where the optimizer is not sharded, which parameters are in which group.
        members = [{k: g[k] for k in ("params",) if k in g} for g in _param_groups(state)]
        members += [{}] * (len(part.param_groups) - len(members))
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            # A group without parameters on this rank counts no steps: a count would go stale.
            | (counted if group["params"] else {})
            for group in part.param_groups
        ]
        inner["param_groups"] = [
            {**group, **chosen} for group, chosen in zip(members, settings, strict=False)
        ]
        own.append(state)
    return own


def _param_groups(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    return state.get("optimizer", state).get("param_groups", [])


def _check_stored(step: Path, wanted: dict[str, Any], of_the_optimizer: set[str]) -> None:
    """Where whole layers differ, Megatron's own loader fails before it can name a tensor."""
    stored = set(FileSystemReader(step).read_metadata().state_dict_metadata)
    keys = {leaf.key for leaf in nested_values(wanted) if isinstance(leaf, ShardedTensor)}
    absent = {key for key in keys - stored if not key.startswith(_NOT_THE_MODEL)}
    _check_names(set(), absent | (of_the_optimizer - stored))


def _check_names(left_over: set[str], absent: set[str]) -> None:
    """Megatron itself would let a part of a larger model load, and leave alone what it lacks."""
    surplus = [name for name in left_over if not name.startswith(_NOT_THE_MODEL)]
    for names, what in ((surplus, "more than the model has"), (absent, "fewer than it has")):
        found = sorted(name for name in names if not name.endswith(_ENGINE_STATE))
        if found:
            raise Misfit(f"it holds {len(found)} tensors {what}: {', '.join(found[:3])}")


def _check_vocabulary(common: Mapping[str, Any], args: Namespace) -> None:
    """Megatron cuts and pads the vocabulary without a word, to suit another number of ranks."""
    saved = vars(common["args"]).get("vocab_size") if "args" in common else None
    if saved is not None and args.vocab_size is not None and saved != args.vocab_size:
        raise Misfit(
            f"its vocabulary has {saved} tokens, the model's {args.vocab_size} "
            "(embedding.word_embeddings.weight)"
        )


def _as_torch_dist(args: Namespace, **changes: Any) -> Namespace:
    changed = copy.copy(args)
    vars(changed).update({"ckpt_format": "torch_dist", "no_save_rng": False, **changes})
    return changed


def _with_group(content: Mapping[str, Any]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**content, "dp_cp_group": group}
