"""Log-probs and entropies of response tokens, fused with the language-model head.

The fused form works on a few tokens at a time, in the forward and in the backward pass, so that
memory does not grow with tokens x vocabulary. Shape letters: ``R`` response tokens, ``H`` hidden
size, ``V`` vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from miles.contracts.types import TokenStats

LOGITS_BUDGET = 2**27
"""Most float32 logits that exist at a time when the chunk size is -1 (512 MiB): 883 tokens of a
vocabulary of 151,936. The passes hold up to four arrays of this size."""


def token_stats(  # noqa: PLR0913
    hidden_RxH: Tensor,
    weight_VxH: Tensor,
    targets_R: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
) -> TokenStats:
    """Log-probs of ``targets_R`` (int64) and entropies of softmax(hidden @ weight.T / temperature).

    The product is computed in the dtype of ``hidden_RxH`` and ``weight_VxH`` (which must agree),
    everything after it in float32. At most ``chunk_size`` tokens have logits at a time (-1: as many
    as fit ``LOGITS_BUDGET``): when that covers all of ``R``, their log-probs are kept for the
    backward pass, else the backward pass computes the logits again, chunk by chunk. ``R`` may be 0:
    the results then still have a gradient (of zeros) for every input.
    """
    chunk = _chunk(chunk_size, weight_VxH.shape[0])
    log_probs_R, entropy_R = _FusedTokenStats.apply(
        hidden_RxH, weight_VxH, bias, targets_R, temperature, chunk, with_entropy
    )
    return TokenStats(log_probs_R=log_probs_R, entropy_R=entropy_R)


def token_stats_from_logits(
    logits_RxV: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
) -> TokenStats:
    """The same from logits that exist already, for models whose head cannot be fused. At most
    ``chunk_size`` tokens have them in float32 at a time, and the backward pass computes that again.
    """
    log_probs_R, entropy_R = _TokenStatsFromLogits.apply(
        logits_RxV, targets_R, temperature, _chunk(chunk_size, logits_RxV.shape[1]), with_entropy
    )
    return TokenStats(log_probs_R=log_probs_R, entropy_R=entropy_R)


def _chunk(chunk_size: int, vocabulary: int) -> int:
    return chunk_size if chunk_size > 0 else max(1, LOGITS_BUDGET // vocabulary)


def _entropy(log_probs_RxV: Tensor) -> Tensor:
    # A logit of -inf has probability 0 and must add 0, not 0 * -inf.
    finite = log_probs_RxV.clamp(min=torch.finfo(torch.float32).min)
    return -(log_probs_RxV.exp() * finite).sum(-1)


def _log_softmax(logits_CxV: Tensor, temperature: float) -> Tensor:
    """Of float32 logits, which it may overwrite."""
    if temperature != 1.0:
        logits_CxV.div_(temperature)
    return torch.log_softmax(logits_CxV, dim=-1)


def _from_hidden(
    hidden_CxH: Tensor, weight_VxH: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    return _log_softmax(functional.linear(hidden_CxH, weight_VxH, bias).float(), temperature)


def _from_logits(logits_CxV: Tensor, temperature: float) -> Tensor:
    return _log_softmax(logits_CxV.to(torch.float32, copy=True), temperature)


def _statistics(
    log_softmax: Callable[[slice], Tensor], targets_R: Tensor, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies, from the log-softmax of ``chunk`` rows at a time."""
    log_probs_R = torch.empty(len(targets_R), dtype=torch.float32, device=targets_R.device)
    entropy_R = torch.empty_like(log_probs_R) if with_entropy else None
    for start in range(0, len(targets_R), chunk):
        rows = slice(start, start + chunk)
        log_probs_CxV = log_softmax(rows)
        log_probs_R[rows] = log_probs_CxV.gather(1, targets_R[rows, None]).squeeze(1)
        if entropy_R is not None:
            entropy_R[rows] = _entropy(log_probs_CxV)
    return log_probs_R, entropy_R


def _logits_gradient(
    log_probs_CxV: Tensor,
    targets_C: Tensor,
    grad_log_probs_C: Tensor | None,
    entropy_terms: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> Tensor:
    """d log p_y / d z_j = [j = y] - p_j, and d H / d z_j = -p_j (log p_j + H); z is logit / T.

    ``entropy_terms`` are H and its gradient.
    """
    factor_CxV = log_probs_CxV.new_zeros(len(targets_C), 1)
    if entropy_terms is not None:
        entropy_C, grad_entropy_C = entropy_terms
        finite_CxV = log_probs_CxV.clamp(min=torch.finfo(torch.float32).min)
        factor_CxV = finite_CxV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
    if grad_log_probs_C is not None:
        factor_CxV.sub_(grad_log_probs_C[:, None])
    grad_CxV = log_probs_CxV.exp().mul_(factor_CxV)
    if grad_log_probs_C is not None:
        grad_CxV.scatter_add_(1, targets_C[:, None], grad_log_probs_C[:, None])
    return grad_CxV.div_(temperature) if temperature != 1.0 else grad_CxV


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Sum in float32: in bf16 a sum over many chunks would lose the small ones."""
    return part.float() if total is None else total.add_(part)


class _FusedTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden_RxH: Tensor,
        weight_VxH: Tensor,
        bias: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        kept_RxV = None
        if len(targets_R) <= chunk:
            kept_RxV = _from_hidden(hidden_RxH, weight_VxH, bias, temperature)

        def log_softmax(rows: slice) -> Tensor:
            if kept_RxV is not None:
                return kept_RxV
            return _from_hidden(hidden_RxH[rows], weight_VxH, bias, temperature)

        log_probs_R, entropy_R = _statistics(log_softmax, targets_R, chunk, with_entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.save_for_backward(hidden_RxH, weight_VxH, bias, targets_R, kept_RxV, entropy_R)
        return log_probs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs_R, grad_entropy_R = grads
        hidden_RxH, weight_VxH, bias, targets_R, kept_RxV, entropy_R = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_RxH) if wants_hidden else None
        grad_weight = grad_bias = None
        for start in range(0, len(targets_R), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_probs_CxV = kept_RxV
            if log_probs_CxV is None:
                log_probs_CxV = _from_hidden(hidden_RxH[rows], weight_VxH, bias, ctx.temperature)
            grad_CxV = _logits_gradient(
                log_probs_CxV,
                targets_R[rows],
                None if grad_log_probs_R is None else grad_log_probs_R[rows],
                None if grad_entropy_R is None else (entropy_R[rows], grad_entropy_R[rows]),
                ctx.temperature,
            ).to(weight_VxH.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_CxV @ weight_VxH
            if wants_weight:
                grad_weight = _plus(grad_weight, grad_CxV.T @ hidden_RxH[rows])
            if wants_bias:
                grad_bias = _plus(grad_bias, grad_CxV.sum(0, dtype=torch.float32))
        return (
            grad_hidden,
            _as_gradient(grad_weight, weight_VxH) if wants_weight else None,
            _as_gradient(grad_bias, bias) if wants_bias else None,
            *(None,) * 4,
        )


class _TokenStatsFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_RxV: Tensor,
        targets_R: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        log_probs_R, entropy_R = _statistics(
            lambda rows: _from_logits(logits_RxV[rows], temperature), targets_R, chunk, with_entropy
        )
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.save_for_backward(logits_RxV, targets_R, entropy_R)
        return log_probs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs_R, grad_entropy_R = grads
        logits_RxV, targets_R, entropy_R = ctx.saved_tensors
        grad_RxV = torch.empty_like(logits_RxV)
        for start in range(0, len(targets_R), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            grad_RxV[rows] = _logits_gradient(
                _from_logits(logits_RxV[rows], ctx.temperature),
                targets_R[rows],
                None if grad_log_probs_R is None else grad_log_probs_R[rows],
                None if grad_entropy_R is None else (entropy_R[rows], grad_entropy_R[rows]),
                ctx.temperature,
            )
        return grad_RxV, None, None, None, None


def _as_gradient(total: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
