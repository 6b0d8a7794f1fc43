"""Draws the next token of every row at once: temperature, top-k, top-p, seeded or not.

The random number of a draw is a hash of (seed, position), so a sequence with a seed gets the same
numbers whatever else is in the batch. Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256
"""Columns summed together in the first level of the inverse-CDF search."""
_HEAD = 1024
"""Most probable tokens looked at before a whole row is sorted for top-p."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How each row samples; arrays of length ``N``."""

    temperature: NDArray[np.float32]
    """0: greedy."""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """-1: off."""
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    """How many tokens the sequence has produced before this one."""


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """``[N]`` numbers in [0, 1), a pure function of (seed, position).

    Two rounds of the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). 52 bits, so that
    ``u * total < total`` holds in float64.
    """
    hashed = _mix(seed ^ _mix(position.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
    return (hashed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_NV: "Tensor", rows: SamplingRows) -> tuple["Tensor", "Tensor"]:
    """Return token ids (int64) and their log-probs (float32), each ``[N]``.

    Log-probs are the log-softmax of logits / temperature before top-k and top-p; of a greedy row,
    at temperature 1. A row whose logits are not finite gets a log-prob that is not finite.
    """
    device = logits_NV.device
    greedy = rows.temperature == 0
    temperature = np.where(greedy, np.float32(1), rows.temperature)
    scaled = logits_NV.float()
    if (temperature != 1).any():
        scaled = scaled / torch.from_numpy(temperature).to(device)[:, None]
    log_probs = torch.log_softmax(scaled, -1)
    if greedy.all():
        tokens = log_probs.argmax(-1)
    else:
        tokens = _draw(log_probs.exp(), rows)
        if greedy.any():
            mask = torch.from_numpy(greedy).to(device)
            tokens = torch.where(mask, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _draw(probs_NV: "Tensor", rows: SamplingRows) -> "Tensor":
    vocabulary = probs_NV.shape[1]
    filtered = (rows.temperature != 0) & (
        (rows.top_p < 1) | ((rows.top_k > 0) & (rows.top_k < vocabulary))
    )
    if filtered.any():
        index = torch.from_numpy(np.flatnonzero(filtered)).to(probs_NV.device)
        probs_NV[index] = keep_top(probs_NV[index], rows.top_p[filtered], rows.top_k[filtered])
    draws = torch.from_numpy(uniform(rows.seed, rows.position)).to(probs_NV.device)
    return inverse_cdf(probs_NV, draws)


def keep_top(probs_NV: "Tensor", top_p: NDArray[np.float32], top_k: NDArray[np.int64]) -> "Tensor":
    """Zero what top-k or top-p drops (both judged on the unfiltered probabilities).

    A token stays while the mass before it, in descending order, is less than ``top_p``.
    """
    vocabulary = probs_NV.shape[1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
    need = min(vocabulary, max(_HEAD, int(limits[top_k > 0].max(initial=0))))
    top_p_N = torch.from_numpy(top_p).to(probs_NV.device).double()[:, None]
    limit_N = torch.from_numpy(limits).to(probs_NV.device)[:, None]
    values, columns = probs_NV.topk(need)
    undecided = (values.double().sum(-1, keepdim=True) < top_p_N) & (limit_N > need)
    if undecided.any():
        values, columns = probs_NV.sort(descending=True)
    before = values.double().cumsum(-1) - values.double()
    rank = torch.arange(values.shape[1], device=probs_NV.device)
    kept = values * ((before < top_p_N) & (rank < limit_N))
    return torch.zeros_like(probs_NV).scatter_(1, columns, kept)


def inverse_cdf(probs_NV: "Tensor", draws_N: "Tensor") -> "Tensor":
    """Token whose interval of the cumulated probabilities holds ``draw * total``. int64 ``[N]``.

    Two levels (blocks of columns, then columns of one block), cumulated in float64: a flat float32
    sum over a large vocabulary would distort small probabilities, and this reads each row once.
    A token of probability 0 is never chosen. ``probs_NV`` need not sum to 1.
    """
    num_rows, vocabulary = probs_NV.shape
    if vocabulary <= _BLOCK:
        cumulated = probs_NV.double().cumsum(-1)
        return _first_above(cumulated, draws_N[:, None] * cumulated[:, -1:])[:, 0]
    whole = vocabulary // _BLOCK
    sums = probs_NV[:, : whole * _BLOCK].view(num_rows, whole, _BLOCK).sum(-1)
    if vocabulary % _BLOCK:
        tail = probs_NV[:, whole * _BLOCK :].sum(-1, keepdim=True)
        sums = torch.cat([sums, tail], dim=1)
    sums = sums.double()
    cumulated = sums.cumsum(-1)
    target = draws_N[:, None] * cumulated[:, -1:]
    block = _first_above(cumulated, target)
    mass = sums.gather(1, block)
    share = ((target - (cumulated.gather(1, block) - mass)) / mass).clamp_(0, 1 - 2.0**-52)

    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs_NV.device)
    inside = probs_NV.gather(1, columns.clamp(max=vocabulary - 1)).double()
    inside.masked_fill_(columns >= vocabulary, 0)
    cumulated = inside.cumsum(-1)
    return (block * _BLOCK + _first_above(cumulated, share * cumulated[:, -1:]))[:, 0]


def _first_above(cumulated: "Tensor", target: "Tensor") -> "Tensor":
    """First column whose cumulated value exceeds the target; ``[N, 1]``, always in range."""
    last = cumulated.shape[1] - 1
    return (cumulated <= target).sum(-1, keepdim=True).clamp_(max=last)
