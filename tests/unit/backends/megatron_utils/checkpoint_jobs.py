"""What the checkpoint tests run on Megatron's ranks: lives of the real actor.

Jobs return plain values, and tensors as bytes: what is compared is compared bit by bit.
"""

import dataclasses
from collections.abc import Generator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.checkpoints import read_tracker
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.checkpoint import CheckpointConfig
from miles.config.root import MilesConfig
from miles.contracts.types import LossOutput, MicroBatch, TokenStats, TrainBatch
from miles.core import device
from miles.rollout.batch import make_batches
from tests.unit.backends.fsdp_utils.jobs import LENGTHS, file_size_limit, make_groups
from tests.unit.backends.megatron_utils import engine_jobs

Weights = dict[str, tuple[str, bytes]]

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")

WHOLE = "whole optimizer"
"""A layout without --use-distributed-optimizer."""


def make_config(model: Path, layout: str = "", **groups: dict[str, Any]) -> MilesConfig:
    """``engine_jobs.make_config``; ``layout`` are more of Megatron's flags."""
    config = engine_jobs.make_config(model, *layout.replace(WHOLE, "").split(), **groups)
    if WHOLE not in layout:
        return config
    argv = tuple(word for word in config.megatron_argv if word != "--use-distributed-optimizer")
    return dataclasses.replace(config, megatron_argv=argv)


def saving(config: MilesConfig, folder: Path, **fields: Any) -> MilesConfig:
    """The run saves to ``folder`` and resumes from it."""
    checkpoint = dataclasses.replace(
        config.checkpoint, save=str(folder), load=str(folder), **fields
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def make_rollouts(config: MilesConfig, count: int, dp_size: int) -> list[list[TrainBatch]]:
    """Shards by rollout and data-parallel rank."""
    return [make_batches(make_groups(i, LENGTHS), config, i, dp_size) for i in range(count)]


def as_bytes(tensor: Tensor) -> tuple[str, bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), flat.numpy().tobytes()


def weights_of(actor: Any) -> Weights:
    return {weight.name: as_bytes(weight.tensor) for weight in actor.ops.hf_weights()}


@contextmanager
def running(config: MilesConfig) -> Generator[tuple[Any, int]]:
    """The actor of this rank and its first rollout. Megatron's globals go in any case."""
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    actor = MegatronTrainRayActor()
    try:
        yield actor, actor.init(config, with_ref=config.algorithm.use_kl_loss)
        actor.shutdown()
    finally:
        from miles.backends.megatron_utils.initialize import destroy

        destroy()


def train_rollouts(
    config: MilesConfig, rollouts: list[list[TrainBatch]], save_at: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Train from where the checkpoint says to the end; what happened and came out."""
    steps: list[Any] = []
    with running(config) as (actor, first):
        for rollout_id in range(first, len(rollouts)):
            stats = actor.train(rollout_id, rollouts[rollout_id][actor.parallel.dp_rank])
            steps += stats.steps
            if rollout_id in save_at:
                actor.save_model(rollout_id)
        return {"first": first, "steps": steps, **report(actor)}


def report(actor: Any) -> dict[str, Any]:
    """Everything that a checkpoint must bring back to a rank of the same place."""
    from miles.backends.megatron_utils import random_state

    optimizer = actor.ops.optimizer
    ref = None if actor.ops.ref is None else actor.ops.trainer_state(optimizer=False, ref=True).ref
    return {
        "weights": weights_of(actor),
        "optimizer": {name: as_bytes(t) for name, t in optimizer.resident_tensors().items()},
        "counts": [group.get("step") for part in optimizer.parts() for group in part.param_groups],
        "rate": optimizer.schedule.rate,
        "rng": {name: as_bytes(state) for name, state in random_state.get().items()},
        "ref": {n: as_bytes(p) for chunk in ref or [] for n, p in chunk.named_parameters()},
        "version": actor._weight_sync.version,
    }


def load_and_report(config: MilesConfig) -> dict[str, Any]:
    """What a start from ``--load`` finds."""
    with running(config) as (actor, first):
        return {"first": first, **report(actor)}


def start(config: MilesConfig) -> int:
    with running(config) as (_, first):
        return first


def save_again(config: MilesConfig) -> dict[str, Any]:
    """What a start from ``--load`` finds; it is written again."""
    with running(config) as (actor, first):
        actor.save_model(first - 1)
        return {"first": first, **report(actor)}


def save_displaced(config: MilesConfig) -> None:
    """A checkpoint in which main parameters begin one element too late."""
    with running(config) as (actor, _):
        for name, tensor in actor.ops.optimizer.resident_tensors().items():
            if "exp_avg" not in name:
                tensor.copy_(tensor.roll(1))
        actor.save_model(0)


def steps_around_an_overflow_in_an_expert(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> dict[str, list[float]]:
    """Gradient norm of each step, and the loss scale of each part of the optimizer after it.

    At the start of a run the second of three steps overflows in one expert of one rank.
    """
    norms: list[float] = []
    scales: list[float] = []
    with running(config) as (actor, first):
        ops, optimizer = actor.ops, actor.ops.optimizer
        shard = rollouts[0][actor.parallel.dp_rank]
        batches = build_micro_batches(shard, packed=True, device=device.current_device())[0]
        for step in range(3 if first == 0 else 1):
            optimizer.zero_grad()
            sums = ops.model.forward_backward(batches, _sum_of_log_probs, with_entropy=False)
            if step == 1 and actor.parallel.rank == 1:
                chunk = optimizer.chunks[0]
                expert = next(p for n, p in chunk.named_parameters() if "local_experts" in n)
                expert.main_grad.view(-1)[0] = float("inf")
            norms.append(optimizer.step(sums).grad_norm)
            scales += [float(p.get_loss_scale()) for p in optimizer.megatron.chained_optimizers]
        actor.save_model(first)
    return {"norms": norms, "scales": scales}


def _sum_of_log_probs(batch: MicroBatch, stats: TokenStats) -> LossOutput:
    return LossOutput(loss=1e-3 * stats.log_probs_R.sum(), sums={})


def attempt_saves(
    config: MilesConfig, rollouts: list[list[TrainBatch]], limit: int
) -> dict[str, Any]:
    """Save after each rollout, the second with no file larger than ``limit`` on rank 0 (as on a
    full disk); what was raised."""
    errors: list[str] = []
    with running(config) as (actor, _):
        for rollout_id, shards in enumerate(rollouts):
            actor.train(rollout_id, shards[actor.parallel.dp_rank])
            with file_size_limit(limit if rollout_id == 1 else None):
                try:
                    actor.save_model(rollout_id)
                    if config.checkpoint.async_save:
                        # The limit is the process's: the thread must write under it.
                        wait([actor._checkpointer.writer.in_flight])
                except Exception as error:  # reported
                    errors.append(f"{rollout_id}: {error}")
    return {"errors": errors}


def save_in_background(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Save asynchronously, train on at once, then save with ``force_sync``."""
    weights: list[Weights] = []
    save = config.checkpoint.save
    assert save is not None
    tracker = None
    with running(config) as (actor, _):
        for rollout_id, shards in enumerate(rollouts):
            actor.train(rollout_id, shards[actor.parallel.dp_rank])
            weights.append(weights_of(actor))
            last = rollout_id == len(rollouts) - 1
            actor.save_model(rollout_id, force_sync=last)
            if last:
                torch.distributed.barrier()
                tracker = read_tracker(save)
    return {"weights": weights, "tracker": tracker}


def advance_random_state(config: MilesConfig) -> dict[str, Any]:
    """Draw numbers, save after a rollout that did not happen, and draw what a resumed run would."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with running(config) as (actor, first):
        if first == 0:
            torch.rand(3 + actor.parallel.rank)
            with get_cuda_rng_tracker().fork():
                torch.rand(2)
            actor.save_model(0)
        plain = torch.rand(4).tolist()
        with get_cuda_rng_tracker().fork():
            return {"plain": plain, "tracked": torch.rand(4).tolist()}


def with_megatrons_own_loader(config: MilesConfig) -> dict[str, Any]:
    """What ``megatron.training.checkpointing.load_checkpoint`` makes of ``--load``."""
    from megatron.training.checkpointing import load_checkpoint

    with running(dataclasses.replace(config, checkpoint=CheckpointConfig())) as (actor, _):
        from megatron.training.global_vars import get_args

        args = get_args()
        args.load, args.use_dist_ckpt = config.checkpoint.load, True
        iteration, _ = load_checkpoint(
            actor.ops.model.chunks, actor.ops.optimizer.megatron, actor.ops.optimizer.schedule
        )
        return {"iteration": iteration, **report(actor)}


def convert(config: MilesConfig, directory: str) -> Weights:
    """As a conversion tool does: the Hugging Face weights as torch_dist."""
    from miles.backends.megatron_utils.checkpoint import save_weights

    with running(config) as (actor, _):
        state = actor.ops.trainer_state(optimizer=False, ref=False)
        bare = dataclasses.replace(state, scheduler=None)
        assert config.rollout.hf_checkpoint is not None
        save_weights(directory, bare, config.rollout.hf_checkpoint)
        return weights_of(actor)


def tensors_in(step: str, vocab_size: int) -> dict[str, Any]:
    """Every tensor of a torch_dist directory as bytes, without rows that only fill the vocabulary
    up; read without a model."""
    import os

    import torch.distributed as dist

    from miles.backends.megatron_utils import cpu_platform
    from miles.core import distributed

    cpu_platform.install()
    assert os.environ["WORLD_SIZE"] == "1"
    distributed.init_process_group(1)
    from megatron.core import dist_checkpointing

    assert dist.get_world_size() == 1
    plain = dist_checkpointing.load_plain_tensors(step)
    return {
        name: as_bytes(
            tensor[:vocab_size] if name.endswith(_VOCABULARY) and tensor.dim() == 2 else tensor
        )
        for name, tensor in plain.items()
        if isinstance(tensor, Tensor)
    }
