"""Causal attention over packed documents without a mask, for both backends.

A packed row of ``T`` tokens would need a mask of ``T × T``. The document boundaries say the same:
a kernel takes them as ``cu_seqlens``; where it does not run (CPU, fp32), documents of like length
run together as a batch padded on the right, where causality alone keeps padding out. Shape letters:
``B`` documents or rows, ``L`` their padded length, ``T`` tokens, ``H`` heads (keys and values may
have fewer: grouped queries), ``D`` head size.
"""

import itertools
from collections import defaultdict
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""What the kernel that takes ``cu_seqlens`` computes in."""
_KERNEL_MAX_HEAD_DIM = 256
_LEAST_BLOCK = 128
"""Queries under one mask where tokens see a window: with fewer, launches would cost the most."""


class Documents:
    """The documents of a packed row: int32 ``cu_seqlens_S`` ``[S + 1]`` and the longest length."""

    def __init__(self, cu_seqlens_S: Tensor, max_seqlen: int) -> None:
        self.cu_seqlens_S = cu_seqlens_S
        self.max_seqlen = max_seqlen

    @cached_property
    def batches(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Documents whose lengths are within a factor of two, as padded batches.

        Returns the token positions of each batch (int64 ``[B, L]``; padding repeats the last
        token) and ``rows_T``: where each token lies in the flattened, concatenated batches.
        """
        bounds = self.cu_seqlens_S.tolist()
        groups: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in itertools.pairwise(bounds):
            groups[(end - start).bit_length()].append((start, end))
        indices: list[Tensor] = []
        rows_T = torch.empty(bounds[-1], dtype=torch.int64)
        num_rows = 0
        for documents in groups.values():
            starts_B, ends_B = torch.tensor(documents).unbind(1)
            tokens_BxL = starts_B[:, None] + torch.arange(int((ends_B - starts_B).max()))
            real_BxL = tokens_BxL < ends_B[:, None]
            rows_BxL = num_rows + torch.arange(tokens_BxL.numel()).view(tokens_BxL.shape)
            rows_T[tokens_BxL[real_BxL]] = rows_BxL[real_BxL]
            indices.append(torch.minimum(tokens_BxL, ends_B[:, None] - 1))
            num_rows += tokens_BxL.numel()
        where = self.cu_seqlens_S.device
        return tuple(index_BxL.to(where) for index_BxL in indices), rows_T.to(where)


def kernel_runs(query: Tensor) -> bool:
    """Whether the kernel that takes ``cu_seqlens`` can compute this (head size last)."""
    return (
        query.device.type == "cuda"
        and query.dtype in KERNEL_DTYPES
        and query.shape[-1] <= _KERNEL_MAX_HEAD_DIM
    )


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """A packed row, where no token attends across a boundary: ``[T, H, D]`` to ``[T, H, D]``.

    ``sliding_window`` is the number of tokens that a token sees, itself included.
    """
    if kernel_runs(query):
        bounds, longest = documents.cu_seqlens_S, documents.max_seqlen
        return attend_segments(
            query, key, value, (bounds, bounds), (longest, longest), scale, sliding_window
        )
    if len(documents.cu_seqlens_S) == 2:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return attend_rows(q, k, v, scale=scale, sliding_window=sliding_window)[0]
    indices, rows_T = documents.batches
    parts: list[Tensor] = []
    for index_BxL in indices:
        q, k, v = (_as_batch(tensor, index_BxL) for tensor in (query, key, value))
        out_BxLxHxD = attend_rows(q, k, v, scale=scale, sliding_window=sliding_window)
        parts.append(out_BxLxHxD.flatten(0, 1))
    return torch.cat(parts).index_select(0, rows_T)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Each row of the batch is one document: ``[B, H, L, D]`` to ``[B, L, H, D]``."""
    num_rows, _, length, _ = query.shape
    if sliding_window is None or length <= sliding_window:
        if query.device.type == "cuda" and not kernel_runs(query):
            key, value = _repeated(query, key, value)
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()
    if kernel_runs(query):
        bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * length
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        documents = Documents(bounds, length)
        packed = attend_documents(q, k, v, documents, scale=scale, sliding_window=sliding_window)
        return packed.unflatten(0, (num_rows, length))
    return attend_end(query, key, value, scale, sliding_window)


def attend_end(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, sliding_window: int | None
) -> Tensor:
    """Queries that are the last tokens of their keys' rows.

    ``[B, H, Lq, D]`` and keys ``[B, H, Lk, D]`` to ``[B, Lq, H, D]``. On a GPU no mask of queries
    times keys exists: the fused kernel knows the shape of the causal one, and with a window each
    block of queries has a mask over the keys that it can see.
    """
    key, value = _repeated(query, key, value)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if sliding_window is None:
        bias = causal_lower_right(num_queries, num_keys)
        out = functional.scaled_dot_product_attention(query, key, value, bias, scale=scale)
        return out.transpose(1, 2).contiguous()
    offset, block = num_keys - num_queries, max(sliding_window, _LEAST_BLOCK)
    parts: list[Tensor] = []
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        first = max(0, offset + start - sliding_window + 1)
        seen = slice(first, offset + stop)
        mask = _window_mask(offset + start - first, stop - start, sliding_window, query.device)
        q, k, v = query[:, :, start:stop], key[:, :, seen], value[:, :, seen]
        parts.append(functional.scaled_dot_product_attention(q, k, v, mask, scale=scale))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _window_mask(before: int, num_queries: int, window: int, where: torch.device) -> Tensor:
    """bool ``[num_queries, before + num_queries]``; ``before`` keys lie before the first query."""
    keys = torch.arange(before + num_queries, device=where)
    back = keys[before:, None] - keys
    return (back >= 0) & (back < window)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """One key and one value head for each query head. With a mask, and on a GPU in fp32, PyTorch's
    fused kernels know no grouped queries: it would hold all scores, queries × keys, instead."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def attend_segments(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    sliding_window: int | None,
) -> Tensor:
    """The kernel: segments of queries, each the last tokens of its segment of keys.

    ``[Tq, H, D]`` and keys ``[Tk, H, D]`` to ``[Tq, H, D]``; ``bounds`` are the int32
    ``cu_seqlens`` of queries and of keys, ``longest`` the longest segment of each.
    """
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=window)
    assert isinstance(out, Tensor)
    return out


def _as_batch(tensor_TxHxD: Tensor, index_BxL: Tensor) -> Tensor:
    gathered = tensor_TxHxD.index_select(0, index_BxL.flatten())
    return gathered.unflatten(0, index_BxL.shape).transpose(1, 2)
