"""What the tests of this folder run on trainer ranks, and the inputs for it.

Jobs return plain values, and tensors as bytes: what is compared is compared bit by bit.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.fsdp_utils.actor import FSDPTrainRayActor
from miles.config.algorithm import AlgorithmConfig
from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.data import DataConfig
from miles.config.fsdp import FsdpConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.contracts.types import Group, Prompt, Sample, Status, TrainBatch
from miles.rollout.batch import make_batches

VOCABULARY = 64
Weights = dict[str, tuple[str, bytes]]


def make_config(model: Path, **groups: dict[str, Any]) -> MilesConfig:
    """fp32, packed rows of up to 40 tokens, steps of 4 samples; ``groups`` override by group."""
    base: dict[str, Any] = {
        "cluster": ClusterConfig(train_backend="fsdp", distributed_timeout_minutes=2),
        "rollout": RolloutConfig(hf_checkpoint=str(model), rollout_max_response_len=16),
        "algorithm": AlgorithmConfig(),
        "fsdp": FsdpConfig(fp32=True),
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
