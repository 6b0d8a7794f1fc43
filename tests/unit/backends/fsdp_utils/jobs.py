"""What the tests of this folder run on trainer ranks, and the inputs for it.

Jobs return plain values, and tensors as bytes: what is compared is compared bit by bit.
"""

import dataclasses
import os
import resource
import signal
from collections.abc import Generator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.actor import FSDPTrainRayActor
from miles.backends.fsdp_utils.model import HeadOptions
from miles.backends.fsdp_utils.parallel import build_mesh
from miles.backends.training_utils.checkpoints import read_tracker
from miles.backends.training_utils.hf_export import export_hf
from miles.backends.training_utils.offload_store import local_tensor
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.algorithm import AlgorithmConfig
from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.data import DataConfig
from miles.config.fsdp import FsdpConfig
from miles.config.offload import OffloadConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.precision import PrecisionConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.contracts.trainer import WeightsTag
from miles.contracts.types import (
    Group,
    LossOutput,
    MicroBatch,
    Prompt,
    Sample,
    Status,
    TokenStats,
    TrainBatch,
)
from miles.core import device, distributed
from miles.rollout.batch import make_batches

VOCABULARY = 64
Weights = dict[str, tuple[str, bytes]]


def make_config(model: Path, **groups: dict[str, Any]) -> MilesConfig:
    """fp32, packed rows of up to 40 tokens, steps of 4 samples; ``groups`` override by group."""
    base: dict[str, Any] = {
        "cluster": ClusterConfig(train_backend="fsdp", distributed_timeout_minutes=2),
        "rollout": RolloutConfig(hf_checkpoint=str(model), rollout_max_response_len=16),
        "algorithm": AlgorithmConfig(),
        "precision": PrecisionConfig(fp32=True),
        "fsdp": FsdpConfig(),
        "offload": OffloadConfig(),
        "optimizer": OptimizerConfig(lr=1e-3),
        "checkpoint": CheckpointConfig(),
        "data": DataConfig(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=40,
            rollout_batch_size=3,
            n_samples_per_prompt=2,
            global_batch_size=4,
            num_rollout=4,
        ),
    }
    for group, fields in groups.items():
        base[group] = dataclasses.replace(base[group], **fields)
    return MilesConfig(**base)


def make_groups(seed: int, lengths: list[tuple[int, int]], group_size: int = 2) -> list[Group]:
    """Samples with random tokens of these prompt and response lengths, some tokens masked."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index, (prompt, response) in enumerate(lengths):
        tokens = [int(t) for t in rng.integers(4, VOCABULARY, prompt + response)]
        mask = [int(m) for m in rng.random(response) > 0.2]
        samples.append(
            Sample(
                prompt=Prompt(group_id=index // group_size, text="", tokens=tuple(tokens[:prompt])),
                index=index,
                tokens=tokens,
                response_length=response,
                loss_mask=[1, *mask[1:]],
                rollout_log_probs=[float(x) for x in rng.uniform(-6, -2, response)],
                status=Status.COMPLETED,
                reward=float(rng.random()),
            )
        )
    return [samples[i : i + group_size] for i in range(0, len(samples), group_size)]


LENGTHS = [(3, 5), (2, 9), (6, 1), (4, 12), (1, 7), (5, 2)]
"""Six samples: with steps of 4, the last step has 2 (on two ranks 1 each)."""


def make_rollouts(config: MilesConfig, count: int, dp_size: int = 2) -> list[list[TrainBatch]]:
    """Shards by rollout and rank."""
    return [make_batches(make_groups(i, LENGTHS), config, i, dp_size) for i in range(count)]


def as_bytes(tensor: Tensor) -> tuple[str, bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), flat.numpy().tobytes()


def from_bytes(value: tuple[str, bytes]) -> Tensor:
    dtype = getattr(torch, value[0].removeprefix("torch."))
    return torch.frombuffer(bytearray(value[1]), dtype=dtype)


def weights_of(actor: FSDPTrainRayActor) -> Weights:
    return {weight.name: as_bytes(weight.tensor) for weight in actor.ops.hf_weights()}


def start(config: MilesConfig, *, with_ref: bool = False) -> tuple[FSDPTrainRayActor, int]:
    actor = FSDPTrainRayActor()
    return actor, actor.init(config, with_ref=with_ref)


def train_rollouts(
    config: MilesConfig,
    rollouts: list[list[TrainBatch]],
    first: int = 0,
    save_at: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train from ``first`` (or from where the checkpoint says, when that is later) to the end."""
    actor, resumed_at = start(config, with_ref=config.algorithm.use_kl_loss)
    steps: list[Any] = []
    metrics: list[Any] = []
    for rollout_id in range(max(first, resumed_at), len(rollouts)):
        stats = actor.train(rollout_id, rollouts[rollout_id][actor.parallel.rank])
        steps += stats.steps
        metrics.append({k: v for k, v in stats.metrics.items() if k.startswith("train/")})
        if rollout_id in save_at:
            actor.save_model(rollout_id)
    weights = weights_of(actor)
    actor.shutdown()
    return {"first": resumed_at, "steps": steps, "metrics": metrics, "weights": weights}


def sizes_of_shards(config: MilesConfig) -> dict[str, int]:
    """How many elements of each parameter this rank holds."""
    actor, _ = start(config)
    parameters = dict(actor.ops.model.module.named_parameters())
    return {name: local_tensor(parameter).numel() for name, parameter in parameters.items()}


def log_probs_of(
    config: MilesConfig, rollouts: list[list[TrainBatch]], weights: WeightsTag = "actor"
) -> dict[str, Any]:
    """Log-probs and entropies by sample index, and how the model was set up."""
    actor, _ = start(config, with_ref=weights == "ref")
    model = actor.ops.model if weights == "actor" else actor.ops.ref
    assert model is not None
    shard = rollouts[0][actor.parallel.rank]
    steps = build_micro_batches(
        shard, packed=config.data.use_dynamic_batch_size, device=device.current_device()
    )
    by_sample: dict[int, list[tuple[float, float]]] = {}
    for batch in (b for step in steps for b in step):
        options = HeadOptions(config.rollout.rollout_temperature, chunk_size=3)
        stats = model.token_stats(batch, options, with_entropy=True)
        assert stats.entropy_R is not None
        (again,) = actor.ops.log_probs([batch], weights=weights)
        # The pass without gradient takes other chunks of tokens.
        torch.testing.assert_close(again, stats.log_probs_R.detach(), atol=1e-5, rtol=0)
        for row, position in enumerate(batch.sample_positions):
            chosen = batch.sequence_R == row
            by_sample[int(shard.sample_indices[position])] = list(
                zip(
                    stats.log_probs_R[chosen].tolist(),
                    stats.entropy_R[chosen].tolist(),
                    strict=True,
                )
            )
    return {"stats": by_sample, "fused": model.fuse_head, "attention": model.attention}


def weights_awake_and_asleep(config: MilesConfig) -> tuple[list[str], Weights, Weights, Weights]:
    """Names in order, and the weights before sleep, asleep and awake again."""
    actor, _ = start(config)
    names = [weight.name for weight in actor.ops.hf_weights()]
    before = weights_of(actor)
    actor.sleep()
    asleep = weights_of(actor)
    actor.wake_up()
    return names, before, asleep, weights_of(actor)


def train_with_naps(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Train, sleeping twice over after each rollout; report what was freed meanwhile."""
    actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
    steps: list[Any] = []
    held_asleep: set[int] = set()
    refused = 0
    for rollout_id, shards in enumerate(rollouts):
        steps += actor.train(rollout_id, shards[actor.parallel.rank]).steps
        for _ in range(2):
            actor.sleep()
        state = actor.ops.store.tensors()
        held_asleep |= {local_tensor(t).untyped_storage().nbytes() for t in state.values()}
        try:
            actor.train(rollout_id, shards[actor.parallel.rank])
        except RuntimeError:
            refused += 1
        for _ in range(2):
            actor.wake_up()
    return {
        "steps": steps,
        "weights": weights_of(actor),
        "held": held_asleep,
        "refused": refused,
        "kinds": sorted({name.rpartition(".")[2] for name in actor.ops.store.tensors()}),
    }


def held_asleep(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """What sleep takes off the device, and how many bytes of each kind of tensor are left."""
    actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
    actor.train(0, rollouts[0][actor.parallel.rank])
    before = weights_of(actor)
    actor.sleep()
    ref, optimizer = actor.ops.ref, actor.ops.optimizer
    assert ref is not None
    kinds = {
        "parameters": dict(actor.ops.model.module.named_parameters()),
        "buffers": dict(actor.ops.model.module.named_buffers()),
        "reference": dict(ref.module.named_parameters()),
        "reference's buffers": dict(ref.module.named_buffers()),
        "optimizer": optimizer.state_tensors(),
    }
    left = {
        kind: [local_tensor(tensor).untyped_storage().nbytes() for tensor in tensors.values()]
        for kind, tensors in kinds.items()
    }
    asleep = weights_of(actor)
    actor.wake_up()
    awake = weights_of(actor)
    policies = [
        group.offload_policy
        for model in (actor.ops.model, ref)
        for part in model.module.modules()
        if isinstance(part, FSDPModule)
        and (group := part._get_fsdp_state()._fsdp_param_group) is not None
    ]
    actor.shutdown()
    return {"left": left, "weights": [before, asleep, awake], "policies": policies}


def export(config: MilesConfig, directory: str, shard_bytes: int, limit: int | None) -> Weights:
    """Export; with ``limit`` no file may grow beyond so many bytes (as on a full disk)."""
    actor, _ = start(config)
    stream, weights = actor.ops.hf_weights(), actor.ops.model.weights
    source = config.rollout.hf_checkpoint
    assert source is not None
    with file_size_limit(limit):
        export_hf(directory, source, weights, stream, shard_bytes=shard_bytes)
    return weights_of(actor)


@contextmanager
def file_size_limit(limit: int | None) -> Generator[None]:
    """Writing further raises ``OSError``, on rank 0 alone."""
    if limit is None or os.environ["RANK"] != "0":
        yield
        return
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def attempt_saves(
    config: MilesConfig, rollouts: list[list[TrainBatch]], limit: int | None
) -> dict[str, Any]:
    """Save after each rollout, the second under ``file_size_limit``; report what was raised."""
    actor, _ = start(config)
    errors: list[str] = []
    for rollout_id, shards in enumerate(rollouts):
        actor.train(rollout_id, shards[actor.parallel.rank])
        with file_size_limit(limit if rollout_id == 1 else None):
            try:
                actor.save_model(rollout_id)
                if config.checkpoint.async_save:
                    # The limit is the process's: the thread must write under it.
                    wait([actor._checkpointer.writer.in_flight])
            except Exception as error:  # reported
                errors.append(f"{rollout_id}: {error}")
    actor.shutdown()
    return {"errors": errors}


def save_in_background(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Save asynchronously, train on at once, then save with ``force_sync``."""
    actor, _ = start(config)
    weights: list[Weights] = []
    trackers: list[int | None] = []
    save = config.checkpoint.save
    assert save is not None
    for rollout_id, shards in enumerate(rollouts):
        actor.train(rollout_id, shards[actor.parallel.rank])
        weights.append(weights_of(actor))
        last = rollout_id == len(rollouts) - 1
        actor.save_model(rollout_id, force_sync=last)
        if last:
            trackers.append(read_tracker(save))
    actor.shutdown()
    return {"weights": weights, "trackers": trackers}


def load_and_report(config: MilesConfig) -> dict[str, Any]:
    """What a start from ``--load`` finds."""
    actor, first = start(config, with_ref=config.algorithm.use_kl_loss)
    optimizer = actor.ops.optimizer
    moments = {
        name: as_bytes(full(tensor))
        for name, tensor in optimizer.state_tensors().items()
        if name.endswith(("exp_avg", "step"))
    }
    ref = {} if actor.ops.ref is None else actor.ops.ref.persistent_tensors()
    result = {
        "first": first,
        "weights": weights_of(actor),
        "moments": moments,
        "rate": optimizer.schedule.get_last_lr()[0],
        "scale": (optimizer.scale.value, optimizer.scale.good_steps),
        "rng": as_bytes(torch.get_rng_state()),
        "ref": {name: as_bytes(full(tensor)) for name, tensor in ref.items()},
    }
    actor.shutdown()
    return result


def advance_random_state(config: MilesConfig) -> list[float]:
    """Draw numbers, save after a rollout that did not happen, and draw what a resumed run would."""
    actor, first = start(config)
    if first == 0:
        torch.rand(3 + actor.parallel.rank)
        actor.save_model(0)
    drawn = torch.rand(4).tolist()
    actor.shutdown()
    return drawn


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step_with_a_bad_gradient(
    config: MilesConfig, rollouts: list[list[TrainBatch]], bad: float
) -> dict[str, Any]:
    """A good step, one whose loss is ``bad`` on rank 1 alone, and a good one."""
    actor, _ = start(config)
    batches = build_micro_batches(
        rollouts[0][actor.parallel.rank], packed=True, device=device.current_device()
    )[0]

    def loss(batch: MicroBatch, stats: TokenStats) -> LossOutput:
        mean = -stats.log_probs_R.sum() / 100
        return LossOutput(loss=mean * factor, sums={"tokens": batch.loss_mask_R.sum()})

    steps: list[Any] = []
    states: list[Any] = []
    for number in range(3):
        factor = bad if number == 1 and actor.parallel.rank == 1 else 1.0
        steps.append(actor.ops.optimizer_step(batches, loss))
        moments = {n: as_bytes(full(t)) for n, t in actor.ops.optimizer.state_tensors().items()}
        states.append((weights_of(actor), moments))
    scale = actor.ops.optimizer.scale
    return {"steps": steps, "states": states, "scale": (scale.value, scale.good_steps)}


def step_with_a_constant_loss(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> dict[str, Any]:
    """One step of a loss that does not depend on the model."""
    actor, _ = start(config)
    batches = build_micro_batches(
        rollouts[0][actor.parallel.rank], packed=True, device=device.current_device()
    )[0]

    def loss(batch: MicroBatch, stats: TokenStats) -> LossOutput:
        return LossOutput(loss=torch.tensor(0.25), sums={})

    step = actor.ops.optimizer_step(batches, loss)
    return {"grad_norm": step.grad_norm, "loss": step.loss, "batches": len(batches)}


def noted_units(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> list[int]:
    """How many uses of its units FSDP2 remembers of the reference and of the policy, after each of
    three times log-probs."""
    actor, _ = start(config, with_ref=True)
    shard = rollouts[0][actor.parallel.rank]
    batch = build_micro_batches(shard, packed=True, device=device.current_device())[0][0]
    seen: list[int] = []
    for _ in range(3):
        for weights, model in (("ref", actor.ops.ref), ("actor", actor.ops.model)):
            actor.ops.log_probs([batch], weights=weights)
            units = [m for m in model.module.modules() if isinstance(m, FSDPModule)]
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
            noted = [len(group._post_forward_indices) for group in groups]
            seen.append(sum(noted) + len(groups[0].comm_ctx.post_forward_order))
    actor.shutdown()
    return seen


def reference_over_rollouts(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> list[dict[str, list[float]]]:
    """Log-probs of one micro-batch under policy and reference, before and after each rollout."""
    actor, _ = start(config, with_ref=True)
    batch = build_micro_batches(rollouts[0][0], packed=True, device=device.current_device())[0][0]
    seen: list[dict[str, list[float]]] = []
    for rollout_id in range(len(rollouts) + 1):
        policy, ref = (
            actor.ops.log_probs([batch], weights=w)[0].tolist() for w in ("actor", "ref")
        )
        seen.append({"policy": policy, "ref": ref})
        if rollout_id < len(rollouts):
            actor.train(rollout_id, rollouts[rollout_id][actor.parallel.rank])
    return seen


def buffers_and_log_probs(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> dict[WeightsTag, dict[str, Any]]:
    """Of policy and reference, before training."""
    actor, _ = start(config, with_ref=True)
    steps = build_micro_batches(
        rollouts[0][actor.parallel.rank], packed=True, device=device.current_device()
    )
    batches = [batch for step in steps for batch in step]
    models: dict[WeightsTag, Any] = {"actor": actor.ops.model, "ref": actor.ops.ref}
    return {
        tag: {
            "buffers": {key: as_bytes(b) for key, b in model.module.named_buffers()},
            "log_probs": [as_bytes(t) for t in actor.ops.log_probs(batches, weights=tag)],
        }
        for tag, model in models.items()
    }


def stored_dtypes(config: MilesConfig) -> set[str]:
    actor, _ = start(config)
    parameters = {str(p.dtype) for p in actor.ops.model.module.parameters()}
    moments = {
        str(t.dtype) for n, t in actor.ops.optimizer.state_tensors().items() if "exp_avg" in n
    }
    return parameters | moments


def gradients_between_micro_batches(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> dict[str, Any]:
    """Elements of every parameter's gradient when each micro-batch of a step begins (0: none), and
    of its shard."""
    actor, _ = start(config)
    optimizer = actor.ops.optimizer
    shard = rollouts[0][actor.parallel.rank]
    batches = build_micro_batches(shard, packed=True, device=device.current_device())[0]
    held: list[list[int]] = []

    def forward(batch: MicroBatch) -> TokenStats:
        gradients = [parameter.grad for parameter in optimizer.names.values()]
        held.append([0 if g is None else local_tensor(g).numel() for g in gradients])
        options = HeadOptions(temperature=1.0, chunk_size=-1)
        return actor.ops.model.token_stats(batch, options, with_entropy=False)

    def loss(batch: MicroBatch, stats: TokenStats) -> LossOutput:
        return LossOutput(loss=stats.log_probs_R.sum(), sums={})

    optimizer.step(batches, loss, forward)
    shards = [local_tensor(parameter).numel() for parameter in optimizer.names.values()]
    actor.shutdown()
    return {"held": held, "shards": shards}


def gradient_norms(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> list[tuple[float, float]]:
    """Of each step: what it reports, and the norm of its gradients in fp64."""
    actor, _ = start(config)
    optimizer = actor.ops.optimizer
    exact: list[float] = []

    def record(*_: Any) -> None:
        gradients = [p.grad for p in optimizer.names.values() if p.grad is not None]
        squares = [full(gradient).double().square().sum() for gradient in gradients]
        exact.append(torch.stack(squares).sum().sqrt().item())

    optimizer.adam.register_step_pre_hook(record)
    stats = actor.train(0, rollouts[0][actor.parallel.rank])
    return list(zip([step.grad_norm for step in stats.steps], exact, strict=True))


def time_outs_of_groups(dp_replicate_size: int, minutes: float) -> list[timedelta]:
    """Of the mesh's axes in their order, each for tensors on the host and on the device."""
    distributed.init_process_group(minutes)
    mesh = build_mesh(dp_replicate_size, minutes)
    backends: list[Any] = [
        mesh.get_group(axis)._get_backend(where)
        for axis in range(mesh.ndim)
        for where in (torch.device("cpu"), device.current_device())
    ]
    return [backend.options._timeout for backend in backends]
