"""Log-probs and entropies of response tokens whose vocabulary is spread over tensor-parallel ranks.

The same quantities as ``training_utils/logprobs.py``, a few tokens at a time in both passes: memory
does not grow with tokens x vocabulary. Shape letters: ``K`` response tokens of this rank,
``H`` hidden size, ``V`` this rank's vocabulary rows without padding, ``C`` tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles.backends.training_utils.logprobs import LOGITS_BUDGET


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the vocabulary this rank's head holds."""

    start: int
    """Token id of its first row."""
    size: int
    """Rows that stand for a token; those after them are padding. May be 0."""
    group: "dist.ProcessGroup | None"
    """Ranks that hold the other rows; ``None`` when there are none."""

    @classmethod
    def of(cls, vocab_size: int, rows: int, group: dist.ProcessGroup) -> "VocabShard":
        """The shard of this rank of ``group``; every rank holds ``rows`` rows with padding."""
        start = group.rank() * rows
        size = min(max(vocab_size - start, 0), rows)
        return cls(start, size, group if group.size() > 1 else None)


def token_stats(  # noqa: PLR0913
    hidden_KxH: Tensor,
    weight: Tensor,
    targets_K: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """float32 ``[K]`` log-probs of ``targets_K`` and entropies of softmax(hidden @ weight.T / T).

    ``weight`` is this rank's part of the head, padding rows included: they take no part. All ranks
    of the shard's group pass the same tokens and get the same results. The gradient of
    ``hidden_KxH`` is this rank's part of a sum over the group, which the caller takes. The product
    is computed in the dtype of the inputs, everything after it in float32. At most ``chunk_size``
    tokens have logits at a time (-1: as many as fit ``LOGITS_BUDGET``). ``K`` may be 0.
    """
    chunk = chunk_size if chunk_size > 0 else max(1, LOGITS_BUDGET // weight.shape[0])
    log_probs_K, entropy_K = _VocabParallelTokenStats.apply(
        hidden_KxH, weight, targets_K, shard, temperature, chunk, with_entropy
    )
    return log_probs_K, entropy_K


def _logits(hidden_CxH: Tensor, weight_VxH: Tensor, temperature: float) -> Tensor:
    logits_CxV = (hidden_CxH @ weight_VxH.T).float()
    return logits_CxV.div_(temperature) if temperature != 1.0 else logits_CxV


def _maximum(logits_CxV: Tensor, shard: VocabShard) -> Tensor:
    if shard.size == 0:
        maximum_C = logits_CxV.new_full((len(logits_CxV),), -torch.inf)
    else:
        maximum_C = logits_CxV.amax(1)
    if shard.group is not None:
        dist.all_reduce(maximum_C, dist.ReduceOp.MAX, group=shard.group)
    return maximum_C


def _local_targets(targets_C: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Which targets this rank holds, and their columns."""
    rows = (targets_C >= shard.start) & (targets_C < shard.start + shard.size)
    rows = rows.nonzero().squeeze(1)
    return rows, targets_C[rows] - shard.start


def _chunk_stats(
    logits_CxV: Tensor, targets_C: Tensor, shard: VocabShard, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The maximum, which is taken off the logits in place, and ``[3, C]``: log-probs, entropies
    (meaningless unless asked for) and log-normalisers of what is left in the logits.

    With z = logit - maximum: log p = z_y - log sum exp z, H = log sum exp z - sum exp(z) z / sum
    exp z.
    """
    maximum_C = _maximum(logits_CxV, shard)
    shifted_CxV = logits_CxV.sub_(maximum_C[:, None])
    sums_3xC = logits_CxV.new_zeros(3, len(targets_C))
    rows, columns = _local_targets(targets_C, shard)
    sums_3xC[0, rows] = shifted_CxV[rows, columns]
    exp_CxV = shifted_CxV.exp()
    sums_3xC[1] = exp_CxV.sum(1)
    if with_entropy:
        # A logit of -inf has probability 0 and must add 0, not 0 * -inf.
        finite_CxV = shifted_CxV.clamp_(min=torch.finfo(torch.float32).min)
        sums_3xC[2] = exp_CxV.mul_(finite_CxV).sum(1)
    if shard.group is not None:
        dist.all_reduce(sums_3xC, group=shard.group)
    target_C, total_C, weighted_C = sums_3xC
    log_total_C = total_C.log()
    entropy_C = log_total_C - weighted_C / total_C
    return maximum_C, torch.stack([target_C - log_total_C, entropy_C, log_total_C])


def _logits_gradient(
    logits_CxV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    shard: VocabShard,
    grad_log_probs_C: Tensor | None,
    entropy_terms: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """d log p_y / d z_j = [j = y] - p_j, and d H / d z_j = -p_j (log p_j + H).

    ``entropy_terms`` are H and its gradient. Overwrites the logits.
    """
    log_probs_CxV = logits_CxV.sub_(normalizer_C[:, None])
    grad_CxV = log_probs_CxV.exp()
    if entropy_terms is None:
        factor_CxV = log_probs_CxV.zero_()
    else:
        entropy_C, grad_entropy_C = entropy_terms
        finite_CxV = log_probs_CxV.clamp_(min=torch.finfo(torch.float32).min)
        factor_CxV = finite_CxV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
    if grad_log_probs_C is None:
        return grad_CxV.mul_(factor_CxV)
    grad_CxV.mul_(factor_CxV.sub_(grad_log_probs_C[:, None]))
    rows, columns = _local_targets(targets_C, shard)
    grad_CxV[rows, columns] += grad_log_probs_C[rows]
    return grad_CxV


class _VocabParallelTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden_KxH: Tensor,
        weight: Tensor,
        targets_K: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        stats_3xK = hidden_KxH.new_empty(3, len(targets_K), dtype=torch.float32)
        weight_VxH = weight[: shard.size]
        kept_KxV = None
        for start in range(0, len(targets_K), chunk):
            rows = slice(start, start + chunk)
            logits_CxV = _logits(hidden_KxH[rows], weight_VxH, temperature)
            maximum_C, chunk_stats = _chunk_stats(logits_CxV, targets_K[rows], shard, with_entropy)
            stats_3xK[:, rows] = chunk_stats
            if len(targets_K) <= chunk:
                kept_KxV = logits_CxV
            else:
                stats_3xK[2, rows] += maximum_C
        log_probs_K, entropy_K, normalizer_K = stats_3xK.unbind()
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        ctx.save_for_backward(hidden_KxH, weight, targets_K, normalizer_K, entropy_K, kept_KxV)
        return log_probs_K.clone(), entropy_K.clone() if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs_K, grad_entropy_K = grads
        hidden_KxH, weight, targets_K, normalizer_K, entropy_K, kept_KxV = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        weight_VxH = weight[: ctx.shard.size]
        grad_hidden = torch.zeros_like(hidden_KxH) if wants_hidden else None
        # Summed in float32: in bf16 a sum over many chunks would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(targets_K), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits_CxV = kept_KxV
            if logits_CxV is None:
                logits_CxV = _logits(hidden_KxH[rows], weight_VxH, ctx.temperature)
            grad_CxV = _logits_gradient(
                logits_CxV,
                normalizer_K[rows],
                targets_K[rows],
                ctx.shard,
                None if grad_log_probs_K is None else grad_log_probs_K[rows],
                None if grad_entropy_K is None else (entropy_K[rows], grad_entropy_K[rows]),
            )
            grad_CxV = grad_CxV.div_(ctx.temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_CxV @ weight_VxH
            if grad_weight is not None:
                grad_weight[: ctx.shard.size] += grad_CxV.T @ hidden_KxH[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 5
