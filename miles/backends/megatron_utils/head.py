"""The language-model head: log-probs and entropies of response tokens in place of logits.

``GPTModel`` calls it (``output_processor``) on the last stage, with the hidden states that the rank
holds. Shape letters as in ``layout.py``; ``N`` is 1, or 2 with entropies.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from miles.backends.megatron_utils.layout import ModelInput
from miles.backends.megatron_utils.vocab_parallel import VocabShard, token_stats
from miles.contracts.types import MicroBatch

mpu: Any = parallel_state


@dataclass(frozen=True)
class HeadOptions:
    """How logits become log-probs."""

    temperature: float
    chunk_size: int
    """See ``vocab_parallel.token_stats``."""


@dataclass(frozen=True)
class Request:
    """What is asked of the head for one micro-batch."""

    batch: MicroBatch
    inputs: ModelInput
    with_entropy: bool


class Head:
    """An output processor of ``GPTModel.forward``; its context is a ``Request``."""

    def __init__(self, vocab_size: int, options: HeadOptions) -> None:
        self._vocab_size = vocab_size
        self._options = options

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: Request,
        **others: Any,
    ) -> Tensor:
        """float32 ``[N, R]``: log-probs and, if asked for, entropies of the whole micro-batch."""
        del others
        batch, place_K = context.batch, context.inputs.place_K
        weight = output_layer.weight if output_weight is None else output_weight
        group = mpu.get_tensor_model_parallel_group()

        def stats(hidden_KxH: Tensor) -> Tensor:
            log_probs_K, entropy_K = token_stats(
                hidden_KxH,
                weight,
                batch.targets_R[place_K],
                VocabShard.of(self._vocab_size, len(weight), group),
                temperature=self._options.temperature,
                chunk_size=self._options.chunk_size,
                with_entropy=context.with_entropy,
            )
            return torch.stack([log_probs_K] if entropy_K is None else [log_probs_K, entropy_K])

        hidden_KxH = _responses(hidden_states, context.inputs, output_layer.sequence_parallel)
        # As the layer's own forward pass: the wait for its parameter's gather hangs on that.
        with _replaced_forward(output_layer, stats):
            stats_NxK = output_layer(hidden_KxH)
        cp_group = mpu.get_context_parallel_group()
        if cp_group.size() == 1:
            return stats_NxK
        return _WholeResponses.apply(stats_NxK, place_K, len(batch.targets_R), cp_group)


def _responses(hidden_states: Tensor, inputs: ModelInput, sequence_parallel: bool) -> Tensor:
    """``[K, H]``, whose gradients are summed over the ranks that hold parts of the vocabulary."""
    group = mpu.get_tensor_model_parallel_group()
    if sequence_parallel:
        hidden_LxBxH = gather_from_sequence_parallel_region(hidden_states, group=group)
        return hidden_LxBxH.flatten(0, 1).index_select(0, inputs.index_K)
    hidden_KxH = hidden_states.flatten(0, 1).index_select(0, inputs.index_K)
    return copy_to_tensor_model_parallel_region(hidden_KxH, group=group)


class _WholeResponses(torch.autograd.Function):
    """Values of this rank's response tokens to those of all context-parallel ranks.

    Every rank goes on to compute the same whole loss, so that in the backward pass each takes the
    gradient of its own tokens and nothing is summed.
    """

    @staticmethod
    def forward(
        ctx: Any, stats_NxK: Tensor, place_K: Tensor, num_tokens: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(place_K)
        stats_NxR = stats_NxK.new_zeros(len(stats_NxK), num_tokens)
        stats_NxR[:, place_K] = stats_NxK
        dist.all_reduce(stats_NxR, group=group)
        return stats_NxR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_K,) = ctx.saved_tensors
        return grads[0][:, place_K], None, None, None


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Generator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
