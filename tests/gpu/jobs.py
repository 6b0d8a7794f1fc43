"""What the tests of this folder run on trainer ranks, beside the jobs of the CPU tests."""

import gc
from pathlib import Path
from typing import Any, Literal

import torch

from miles.backends.fsdp_utils.attention import NAME as PACKED_ATTENTION
from miles.backends.fsdp_utils.model import HeadOptions
from miles.backends.training_utils.offload_store import local_tensor
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.root import MilesConfig
from miles.contracts.types import TrainBatch
from miles.core import device
from miles.ray.train.actor_factory import BACKENDS
from tests.unit.backends.fsdp_utils.jobs import start, weights_of

SEGMENTS = 8 << 20
"""Bytes of the few smallest segments of PyTorch's allocator (2 MiB), which small tensors share."""
Place = Literal["host", "disk", "streamed"]
"""Where the state lies asleep, or its optimizer's part always."""


def offload_to(where: Place, directory: Path) -> dict[str, Any]:
    """Fields of ``OffloadConfig``."""
    if where == "host":
        return {}
    fields = {"offload_train_target": "disk", "offload_train_disk_dir": str(directory)}
    return {**fields, "stream_optimizer_state_to_disk": where == "streamed"}


def _without_an_actor() -> device.MemoryStats:
    gc.collect()
    device.empty_cache()
    return device.memory_stats()


def memory_of_a_step(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Peak bytes of forward and backward over a rollout's first micro-batch, and its tokens."""
    actor, _ = start(config)
    model = actor.ops.model
    shard = rollouts[0][actor.parallel.rank]
    batch = build_micro_batches(shard, packed=True, device=device.current_device())[0][0]
    held = device.memory_stats().allocated_bytes
    torch.accelerator.reset_peak_memory_stats()
    head = HeadOptions(temperature=1.0, chunk_size=1024)
    stats = model.token_stats(batch, head, with_entropy=False)
    stats.log_probs_R.sum().backward()
    used = device.memory_stats().peak_bytes - held
    actor.shutdown()
    assert model.attention == PACKED_ATTENTION
    return {"bytes": used, "tokens": batch.tokens_T.numel()}


def memory_after_a_step(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Bytes of this rank's actor on its device after a rollout, and how many its shards and its
    optimizer have, wherever they are; where the latter are; then what PyTorch holds asleep."""
    others = _without_an_actor()
    actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
    actor.train(0, rollouts[0][actor.parallel.dp_rank])
    tensors = [*actor.ops.model.module.parameters(), *actor.ops.optimizer.state_tensors().values()]
    if actor.ops.ref is not None:
        tensors += actor.ops.ref.module.parameters()
    shards = [local_tensor(tensor) for tensor in tensors]
    before = weights_of(actor)
    # The workspaces of matrix products are larger than this model.
    device.empty_cache()
    awake = device.memory_stats().allocated_bytes - others.allocated_bytes
    actor.sleep()
    asleep = device.memory_stats().reserved_bytes - others.reserved_bytes
    weights = weights_of(actor)
    actor.wake_up()
    steps = actor.train(1, rollouts[1][actor.parallel.dp_rank]).steps
    actor.shutdown()
    return {
        "awake": awake,
        "asleep": asleep,
        "state": sum(shard.numel() * shard.element_size() for shard in shards),
        "places": sorted({shard.device.type for shard in shards}),
        "unchanged": before == weights,
        "steps": steps,
    }


def memory_around_sleep(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Bytes of this rank's actor on its device, awake, and of what PyTorch holds for it asleep:
    twice after a rollout and once after the next; the weights around it, and the steps."""
    others = _without_an_actor()
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    actor.train(0, rollouts[0][actor.parallel.dp_rank])
    before = weights_of(actor)
    awake: list[int] = []
    asleep: list[int] = []

    def nap() -> None:
        awake.append(device.memory_stats().allocated_bytes - others.allocated_bytes)
        actor.sleep()
        asleep.append(device.memory_stats().reserved_bytes - others.reserved_bytes)
        actor.wake_up()

    nap()
    nap()
    after = weights_of(actor)
    stats = actor.train(1, rollouts[1][actor.parallel.dp_rank])
    nap()
    actor.shutdown()
    return {
        "awake": awake,
        "asleep": asleep,
        "unchanged": before == after,
        "steps": stats.steps,
    }
