"""Causal attention over packed documents without a mask, registered with transformers.

A packed row of ``T`` tokens would need a mask of ``T × T``. The document boundaries say the same:
a kernel takes them as ``cu_seqlens``; where it does not run (CPU, fp32), documents of like length
run together as a batch padded on the right, where causality alone keeps padding out. Shape letters:
``B`` documents or rows, ``L`` their padded length, ``T`` tokens, ``H`` heads, ``D`` head size.
"""

import itertools
from collections import defaultdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from miles.backends.fsdp_utils.arguments import missing_attention_package
from miles.config.errors import ConfigError, Problem
from miles.core import device, distributed, logging

NAME = "miles_sdpa"
"""What ``sdpa`` becomes in models that take attention functions from transformers' registry."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_MAX_HEAD_DIM = 256

log = logging.get(__name__)


def check_requested(requested: str | None) -> None:
    """Raise ``ConfigError`` when the package of ``--attn-implementation`` is missing."""
    package = None if requested is None else missing_attention_package(requested)
    if package is not None:
        remedy = f"needs the package {package}: install it, or pass sdpa"
        raise ConfigError([Problem("--attn-implementation", requested, remedy)])


def install(model: PreTrainedModel, requested: str | None, compute: torch.dtype) -> None:
    """Settle the attention of a model; logged when it was not asked for.

    Unset, it is flash_attention_2 on CUDA where that is installed and can compute in this dtype,
    else what transformers chose: sdpa where the model has it. ``sdpa`` then becomes the attention
    of this module where the model can use it.
    """
    flash = missing_attention_package("flash_attention_2") is None and compute in _KERNEL_DTYPES
    supported = model._supports_flash_attn  # pyright: ignore[reportPrivateUsage]
    if requested is None and device.device_type() == "cuda" and flash and supported:
        model.set_attn_implementation("flash_attention_2")
    chosen = implementation(model)
    if requested is None and distributed.rank() == 0:
        log.info("attention: %s (--attn-implementation chooses another)", chosen)
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    supported = model._supports_attention_backend and layers <= _KNOWN_LAYERS  # pyright: ignore[reportPrivateUsage]
    if chosen == "sdpa" and supported:
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)


def implementation(model: PreTrainedModel) -> str:
    """The name under which transformers finds the model's attention."""
    return model.config._attn_implementation  # pyright: ignore[reportPrivateUsage, reportReturnType]


def packed_arguments(name: str, cu_seqlens_S: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Arguments of ``model(...)`` that tell the attention where documents end.

    Other implementations find it in position ids that restart, and build a mask.
    """
    if name == NAME:
        return {"documents": Documents(cu_seqlens_S, max_seqlen)}
    if name.startswith("flash_attention"):
        return {
            "cu_seq_lens_q": cu_seqlens_S,
            "cu_seq_lens_k": cu_seqlens_S,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
        }
    return {}


def builds_packed_mask(name: str) -> bool:
    """Whether a packed row of ``T`` tokens costs a mask of ``T × T``."""
    return name in ("eager", "sdpa")


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


def packed_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: ``[B, H, L, D]`` in, ``[B, L, H, D]`` out.

    With ``documents`` (``B == 1``) no token attends across a boundary. Raises ``ValueError`` for
    what the kernels here cannot do.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if asked or dropout or attention_mask is not None or kwargs.get("is_causal") is False:
        raise ValueError(
            f"sdpa cannot do what this model's attention asks for ({', '.join(asked) or 'a mask'}):"
            " pass --attn-implementation eager"
        )
    if documents is None:
        return _causal(module, query, key, value, scaling, sliding_window), None
    if _kernel_runs(query):
        return _varlen(query, key, value, documents, scaling, sliding_window), None
    if len(documents.cu_seqlens_S) == 2:
        return _causal(module, query, key, value, scaling, sliding_window), None
    indices, rows_T = documents.batches
    parts: list[Tensor] = []
    for index_BxL in indices:
        q, k, v = (_as_batch(tensor, index_BxL) for tensor in (query, key, value))
        parts.append(_causal(module, q, k, v, scaling, sliding_window).flatten(0, 1))
    return torch.cat(parts).index_select(0, rows_T)[None], None


def _as_batch(tensor_1xHxTxD: Tensor, index_BxL: Tensor) -> Tensor:
    gathered = tensor_1xHxTxD[0].index_select(1, index_BxL.flatten())
    return gathered.unflatten(1, index_BxL.shape).transpose(0, 1)


def _kernel_runs(query: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in _KERNEL_DTYPES
        and query.shape[-1] <= _KERNEL_MAX_HEAD_DIM
    )


def _causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Each row of the batch is one document: ``[B, H, L, D]`` to ``[B, L, H, D]``."""
    num_rows, _, length, _ = query.shape
    if sliding_window is None or length <= sliding_window:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)[0]
    if _kernel_runs(query):
        bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * length
        q, k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (query, key, value))
        packed = _varlen(q, k, v, Documents(bounds, length), scaling, sliding_window)
        return packed.unflatten(1, (num_rows, length))[0]
    position_L = torch.arange(length, device=query.device)
    back_LxL = position_L[:, None] - position_L
    band_LxL = (back_LxL >= 0) & (back_LxL < sliding_window)
    return sdpa_attention_forward(module, query, key, value, band_LxL, scaling=scaling)[0]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """A packed row through the kernel: ``[1, H, T, D]`` to ``[1, T, H, D]``."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds, longest = documents.cu_seqlens_S, documents.max_seqlen
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window)
    assert isinstance(out, Tensor)
    return out[None]
