"""What the tests of the Megatron backend run on trainer ranks, beside the jobs of the CPU tests."""

import gc
from typing import Any

import torch

from miles.backends.training_utils.packing import build_micro_batches
from miles.config.root import MilesConfig
from miles.contracts.types import LossOutput, MicroBatch, TokenStats, TrainBatch
from miles.core import device
from tests.unit.backends.megatron_utils.engine_jobs import start


def peak_of_a_start(config: MilesConfig) -> dict[str, int]:
    """The most bytes on the device until the trainer could train, and its parameters."""
    gc.collect()
    device.empty_cache()
    others = device.memory_stats().allocated_bytes
    torch.accelerator.reset_peak_memory_stats()
    actor, _ = start(config)
    peak = device.memory_stats().peak_bytes - others
    numel = sum(p.numel() for chunk in actor.ops.model.chunks for p in chunk.parameters())
    actor.shutdown()
    return {"bytes": peak, "parameters": numel}


def memory_of_a_step(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Peak bytes of forward and backward over a rollout's first micro-batch, and its tokens."""
    actor, _ = start(config)
    batch = build_micro_batches(rollouts[0][0], packed=True, device=device.current_device())[0][0]

    def loss(batch: MicroBatch, stats: TokenStats) -> LossOutput:
        return LossOutput(loss=stats.log_probs_R.mean(), sums={})

    held = device.memory_stats().allocated_bytes
    torch.accelerator.reset_peak_memory_stats()
    actor.ops.model.forward_backward([batch], loss, with_entropy=False)
    used = device.memory_stats().peak_bytes - held
    vocabulary = actor.ops.args.padded_vocab_size
    actor.shutdown()
    return {"bytes": used, "tokens": batch.tokens_T.numel(), "vocabulary": vocabulary}
