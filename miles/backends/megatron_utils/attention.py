"""Attention of Megatron's local layers: causal, grouped queries, packed rows and context
parallelism, on PyTorch's kernels.

Under context parallelism a rank holds two of the ``2 * cp`` chunks of every document, ``rank`` and
``2 * cp - 1 - rank``, so that all ranks have equal work (Llama 3, arXiv:2407.21783, section 3.3.2;
the order that Megatron's rotary embedding assumes). Keys and values are gathered from all ranks.
Shape letters: ``T`` tokens of this rank, ``B`` rows, ``L`` their length on this rank, ``H`` heads,
``D`` head size, ``S`` documents.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from miles.backends.training_utils import packed_attention
from miles.backends.training_utils.packed_attention import Documents

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_PACKED_FORMATS = ("thd", "sbhd")
_CACHED_LAYOUTS = 16


class SelfAttention(MegatronSelfAttention):
    """Megatron's, with all tokens of a packed row rotated at once, by their positions. Its own
    rotary embedding of packed rows (without Transformer Engine) launches some ten kernels for each
    document."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[T, 1, hidden]`` to the same. ``rotary_pos_emb`` has a row for each position."""
        # A core attention of the user's gets packed rows as Megatron documents them.
        at_once = isinstance(self.core_attention, CoreAttention)
        if at_once and packed_seq_params is not None and rotary_pos_emb is not None:
            group, (bounds_S, _) = self.pg_collection.cp, _documents_of(packed_seq_params)
            places_T = rank_positions(bounds_S, group.size(), group.rank())
            rotary_pos_emb = rotary_pos_emb.index_select(0, places_T)
            # One row of many documents: only the core attention must know where they end.
            packed_seq_params = dataclasses.replace(packed_seq_params, qkv_format="sbhd")
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


class CoreAttention(MegatronModule):
    """Drop-in for Megatron's ``DotProductAttention``, which has neither packing nor context
    parallelism. Raises ``ValueError`` for what it cannot do."""

    def __init__(  # noqa: PLR0913
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        del cp_comm_type  # The result is the same for each way of moving keys and values.
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check(config, attn_mask_type, attention_type, dropout)
        self.scale = softmax_scale
        self.sliding_window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.sliding_window = _tokens_seen(config.window_size)
        self.cp_group: Any = (
            parallel_state.get_context_parallel_group()
            if pg_collection is None
            else pg_collection.cp
        )

    def forward(  # noqa: PLR0913
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Rows padded on the right: ``[L, B, H, D]`` to ``[L, B, H * D]``. Packed: ``[T, H, D]``,
        or ``[T, 1, H, D]``, likewise; every token must belong to a document of ``cu_seqlens``.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("this attention is causal: pass no mask and no bias")
        if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
            raise ValueError(f"this attention is causal, not {attn_mask_type.name}")
        if packed_seq_params is not None:
            bounds_S, longest = _documents_of(packed_seq_params)
            q, k, v = (tensor.flatten(0, -3) for tensor in (query, key, value))
            out_TxHxD = self._packed(q, k, v, bounds_S, longest)
            return out_TxHxD.reshape(*query.shape[:-2], -1)
        cp_size = self.cp_group.size()
        if cp_size == 1:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out_BxLxHxD = packed_attention.attend_rows(
                q, k, v, scale=self.scale, sliding_window=self.sliding_window
            )
            return out_BxLxHxD.transpose(0, 1).flatten(2)
        length, num_rows = query.shape[:2]
        bounds_S = _equal_bounds(num_rows, length * cp_size, query.device)
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        out_TxHxD = self._packed(q, k, v, bounds_S, length * cp_size)
        return out_TxHxD.unflatten(0, (num_rows, length)).transpose(0, 1).flatten(2)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, bounds_S: Tensor, longest: int
    ) -> Tensor:
        if self.cp_group.size() == 1:
            documents = _documents(bounds_S, longest)
            return packed_attention.attend_documents(
                query, key, value, documents, scale=self.scale, sliding_window=self.sliding_window
            )
        layout = rank_layout(bounds_S, self.cp_group.size(), self.cp_group.rank())
        # One collective for both. Its backward sums over the ranks: each has used these keys.
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), group=self.cp_group
        )
        keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        return attend_share(query, keys, values, layout, self.scale, self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """What the tokens of one context-parallel rank attend to: two segments for each document.

    The queries of a segment are the last tokens of its keys. ``key_index`` (int64) finds the keys
    of all segments, one after the other, among the keys gathered rank by rank; the bounds are int32
    ``[2 S + 1]``.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    key_index: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


def zigzag_indices(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """The positions in the whole packed row that a context-parallel rank holds, in its order.

    ``cu_seqlens`` (``[S + 1]``) counts the whole, padded documents. Returns int64 on its device.
    Raises ``ValueError`` when a document cannot be cut into ``2 * cp_size`` equal chunks.
    """
    starts, chunks = _chunks(cu_seqlens, cp_size)
    return _zigzag(starts, chunks, cp_size, cp_rank).to(cu_seqlens.device)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def rank_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Where each token that a context-parallel rank holds stands in its document; see
    ``zigzag_indices``."""
    starts, chunks = _chunks(cu_seqlens, cp_size)
    return _zigzag(torch.zeros_like(starts), chunks, cp_size, cp_rank).to(cu_seqlens.device)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def rank_layout(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> RankLayout:
    """The layout of a rank; the same tensor is laid out once for all layers."""
    starts, chunks = _chunks(cu_seqlens, cp_size)
    ranks = [_zigzag(starts, chunks, cp_size, rank) for rank in range(cp_size)]
    order = torch.cat(ranks)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    through = torch.tensor([cp_rank + 1, 2 * cp_size - cp_rank])
    key_lengths = (chunks[:, None] * through).flatten()
    query_lengths = chunks.repeat_interleave(2)
    where = cu_seqlens.device
    return RankLayout(
        query_bounds=_bounds(query_lengths).to(where),
        key_bounds=_bounds(key_lengths).to(where),
        key_index=place[_ranges(starts.repeat_interleave(2), key_lengths)].to(where),
        query_lengths=tuple(query_lengths.tolist()),
        key_lengths=tuple(key_lengths.tolist()),
    )


def drop_layouts() -> None:
    """Let go of the layouts of past rows, which lie on the device; each is made anew if needed."""
    for cached in (rank_positions, rank_layout, _documents, _equal_bounds):
        cached.cache_clear()


def attend_share(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RankLayout,
    scale: float | None,
    sliding_window: int | None,
) -> Tensor:
    """One rank's queries ``[T, H, D]`` against the keys and values of all ranks, in rank order."""
    keys, values = (tensor.index_select(0, layout.key_index) for tensor in (keys, values))
    if packed_attention.kernel_runs(query):
        bounds = (layout.query_bounds, layout.key_bounds)
        longest = (max(layout.query_lengths), max(layout.key_lengths))
        return packed_attention.attend_segments(
            query, keys, values, bounds, longest, scale, sliding_window
        )
    segments = zip(
        query.split(layout.query_lengths),
        keys.split(layout.key_lengths),
        values.split(layout.key_lengths),
        strict=True,
    )
    parts: list[Tensor] = []
    for segment in segments:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in segment)
        parts.append(packed_attention.attend_end(q, k, v, scale, sliding_window)[0])
    return torch.cat(parts)


def _check(config: Any, mask: AttnMaskType, attention_type: str, dropout: float) -> None:
    if dropout:
        raise ValueError(f"--attention-dropout {dropout}: only 0 can be computed here")
    if config.softmax_type != "vanilla":
        raise ValueError(
            f"--softmax-type {config.softmax_type} needs Transformer Engine; only vanilla runs here"
        )
    if mask not in _CAUSAL or attention_type != "self":
        raise ValueError(f"this attention is causal self-attention, not {mask} {attention_type}")


def _tokens_seen(window_size: tuple[int, int]) -> int | None:
    """Megatron counts the tokens to the left, and to the right, of the query's own."""
    left, right = window_size
    if right not in (0, -1):
        raise ValueError(f"--window-size {left},{right}: a causal window ends at the token itself")
    return None if left < 0 else left + 1


def _documents_of(params: Any) -> tuple[Tensor, int]:
    if params.qkv_format not in _PACKED_FORMATS or params.local_cp_size is not None:
        raise ValueError("packed rows are thd, over the one context-parallel group")
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded, params.max_seqlen_q


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _documents(cu_seqlens: Tensor, longest: int) -> Documents:
    """The same tensor is sorted into batches once for all layers."""
    return Documents(cu_seqlens, longest)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _equal_bounds(num_rows: int, length: int, where: torch.device) -> Tensor:
    return torch.arange(num_rows + 1, dtype=torch.int32, device=where) * length


def _chunks(cu_seqlens: Tensor, cp_size: int) -> tuple[Tensor, Tensor]:
    """Starts of the documents and lengths of their chunks, on the host."""
    bounds = cu_seqlens.cpu().long()
    lengths, num_chunks = bounds.diff(), 2 * cp_size
    if cp_size > 1 and (lengths % num_chunks).any():
        raise ValueError(f"document lengths {lengths.tolist()} are not multiples of {num_chunks}")
    return bounds[:-1], lengths if cp_size == 1 else lengths // num_chunks


def _zigzag(starts: Tensor, chunks: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    if cp_size == 1:
        return _ranges(starts, chunks)
    numbers = torch.tensor([cp_rank, 2 * cp_size - 1 - cp_rank])
    return _ranges(
        (starts[:, None] + chunks[:, None] * numbers).flatten(), chunks.repeat_interleave(2)
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """``[s, s + 1, ..., s + l - 1]`` for each start and length, concatenated."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))


def _bounds(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
