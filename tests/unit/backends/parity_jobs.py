"""One recorded rollout through a backend's actor, or through transformers and torch alone."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from miles.backends.training_utils.consume import consume
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.root import MilesConfig
from miles.contracts.parallel import ParallelState
from miles.contracts.trainer import PolicyOps, WeightsTag
from miles.contracts.types import (
    LossFn,
    MicroBatch,
    NamedTensor,
    StepStats,
    TokenStats,
    TrainBatch,
    TrainStats,
)
from miles.core import device
from miles.ray.train.actor_factory import BACKENDS


def log_probs_and_training(config: MilesConfig, shards: list[TrainBatch]) -> dict[str, Any]:
    """On a rank: log-probs by sample index before the first step, then what training reports."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config, with_ref=True)
    shard = shards[actor.parallel.dp_rank]
    log_probs = log_probs_by_sample(actor.ops, shard, config)
    stats = actor.train(0, shard)
    actor.shutdown()
    return {"log_probs": log_probs, "steps": list(stats.steps), "metrics": training(stats)}


def by_transformers(config: MilesConfig, shard: TrainBatch) -> dict[str, Any]:
    """The same, in this process, without a backend."""
    ops = TransformersOps(config)
    log_probs = log_probs_by_sample(ops, shard, config)
    stats = consume(ops, shard, config)
    return {"log_probs": log_probs, "steps": list(stats.steps), "metrics": training(stats)}


def log_probs_by_sample(
    ops: PolicyOps, shard: TrainBatch, config: MilesConfig
) -> dict[int, list[float]]:
    steps = build_micro_batches(
        shard, packed=config.data.use_dynamic_batch_size, device=device.current_device()
    )
    batches = list(itertools.chain.from_iterable(steps))
    found: dict[int, list[float]] = {}
    for batch, values in zip(batches, ops.log_probs(batches, weights="actor"), strict=True):
        for row, position in enumerate(batch.sample_positions):
            chosen = values[batch.sequence_R == row]
            found[int(shard.sample_indices[position])] = chosen.tolist()
    return found


def training(stats: TrainStats) -> dict[str, float]:
    return {k: v for k, v in stats.metrics.items() if k.startswith("train/")}


class TransformersOps:
    """The three primitives in the plainest way: every sequence alone, all logits, torch's AdamW."""

    def __init__(self, config: MilesConfig) -> None:
        self._temperature = config.rollout.rollout_temperature
        self._settings = config.optimizer
        self._model = load(config.rollout.hf_checkpoint)
        self._ref = load(config.algorithm.ref_load)
        self._adam = torch.optim.AdamW(
            self._model.parameters(),
            lr=self._settings.lr,
            betas=(self._settings.adam_beta1, self._settings.adam_beta2),
            eps=self._settings.adam_eps,
            weight_decay=self._settings.weight_decay,
        )
        self.parallel = ParallelState(rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=None)

    @torch.no_grad()
    def log_probs(self, batches: Sequence[MicroBatch], *, weights: WeightsTag) -> list[Tensor]:
        model = self._model if weights == "actor" else self._ref
        return [self._token_stats(model, batch).log_probs_R for batch in batches]

    def optimizer_step(self, batches: Sequence[MicroBatch], loss: LossFn) -> StepStats:
        self._adam.zero_grad()
        total = 0.0
        sums: dict[str, float] = {}
        for batch in batches:
            output = loss(batch, self._token_stats(self._model, batch))
            output.loss.backward()
            total += output.loss.item()
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_grad)
        self._adam.step()
        return StepStats(
            loss=total,
            grad_norm=norm.item(),
            learning_rate=self._settings.lr,
            skipped=False,
            sums=sums,
        )

    def hf_weights(self) -> Iterator[NamedTensor]:
        for name, parameter in self._model.named_parameters():
            yield NamedTensor(name=name, tensor=parameter.detach())

    def _token_stats(self, model: Any, batch: MicroBatch) -> TokenStats:
        rows = [
            model(input_ids=tokens[None], use_cache=False).logits[0]
            for tokens in batch.tokens_T.tensor_split(batch.cu_seqlens_S[1:-1].long().cpu())
        ]
        logits_RxV = torch.cat(rows)[batch.logit_index_R] / self._temperature
        all_RxV = torch.log_softmax(logits_RxV, dim=-1)
        return TokenStats(
            log_probs_R=all_RxV.gather(1, batch.targets_R[:, None]).squeeze(1),
            entropy_R=-(all_RxV.exp() * all_RxV).sum(-1),
        )


def load(path: str | None) -> Any:
    assert path is not None
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device.current_device())
