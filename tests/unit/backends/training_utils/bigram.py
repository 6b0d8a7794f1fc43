"""A small real backend: a bigram model whose ranks add up their gradients."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from miles.backends.training_utils.logprobs import token_stats
from miles.backends.training_utils.losses import needs_entropy
from miles.config.root import MilesConfig
from miles.contracts.parallel import ParallelState
from miles.contracts.trainer import WeightsTag
from miles.contracts.types import LossFn, MicroBatch, NamedTensor, StepStats, TokenStats

VOCABULARY, HIDDEN = 11, 5


class BigramOps:
    """``PolicyOps`` over ``embedding[token] @ head.T``, trained with plain gradient descent."""

    def __init__(self, config: MilesConfig, parallel: ParallelState) -> None:
        generator = torch.Generator().manual_seed(3)
        self.config = config
        self.parallel = parallel
        self.embedding, self.head = (
            torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_() for _ in "eh"
        )
        self.reference = (self.embedding.detach() * 0.9, self.head.detach() * 1.1)
        self.log_prob_passes: list[tuple[WeightsTag, int]] = []
        self.steps: list[Sequence[MicroBatch]] = []

    def forward(self, batch: MicroBatch, weights: tuple[Tensor, Tensor]) -> TokenStats:
        embedding, head = weights
        return token_stats(
            embedding[batch.tokens_T[batch.logit_index_R]],
            head,
            batch.targets_R,
            temperature=self.config.rollout.rollout_temperature,
            chunk_size=self.config.algorithm.log_probs_chunk_size,
            with_entropy=needs_entropy(self.config.algorithm),
        )

    @torch.no_grad()
    def log_probs(self, batches: Sequence[MicroBatch], *, weights: WeightsTag) -> list[Tensor]:
        self.log_prob_passes.append((weights, len(batches)))
        chosen = self.reference if weights == "ref" else (self.embedding, self.head)
        results: list[Tensor] = []
        for batch in batches:
            # As in a real backend, a forward pass needs every rank.
            self._sum(torch.zeros(1))
            results.append(self.forward(batch, chosen).log_probs_R)
        return results

    def optimizer_step(self, batches: Sequence[MicroBatch], loss: LossFn) -> StepStats:
        self.steps.append(batches)
        parameters = (self.embedding, self.head)
        total = torch.zeros(())
        sums: dict[str, Tensor] = {}
        for batch in batches:
            self._sum(torch.zeros(1))
            output = loss(batch, self.forward(batch, parameters))
            output.loss.backward()
            total += output.loss.detach()
            for name, value in output.sums.items():
                sums[name] = sums.get(name, torch.zeros(())) + value
        squares = 0.0
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = self._sum(parameter.grad)
            squares += gradient.square().sum().item()
            parameter.data -= 2.0 * gradient
            parameter.grad = None
        return StepStats(
            loss=self._sum(total).item(),
            grad_norm=squares**0.5,
            learning_rate=2.0,
            skipped=False,
            sums={name: self._sum(value).item() for name, value in sorted(sums.items())},
        )

    def hf_weights(self) -> Iterator[NamedTensor]:
        yield NamedTensor("embedding", self.embedding.detach())
        yield NamedTensor("head", self.head.detach())

    def _sum(self, tensor: Tensor) -> Tensor:
        return self.parallel.dp_sum(tensor)


def alone() -> ParallelState:
    return ParallelState(rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=None)


def joined() -> ParallelState:
    rank, size = dist.get_rank(), dist.get_world_size()
    return ParallelState(
        rank=rank, world_size=size, dp_rank=rank, dp_size=size, dp_group=dist.group.WORLD
    )
