"""The attention of a transformers model: which implementation, and packed documents without a mask
(``training_utils/packed_attention.py``) registered with transformers.

Shape letters: ``B`` rows, ``L`` their padded length, ``T`` tokens, ``H`` heads, ``D`` head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from miles.backends.fsdp_utils.arguments import missing_attention_package
from miles.backends.training_utils import packed_attention
from miles.backends.training_utils.packed_attention import Documents
from miles.config.errors import ConfigError, Problem
from miles.core import device, distributed, logging

NAME = "miles_sdpa"
"""What ``sdpa`` becomes in models that take attention functions from transformers' registry."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")

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
    flash = (
        missing_attention_package("flash_attention_2") is None
        and compute in packed_attention.KERNEL_DTYPES
    )
    supported = model._supports_flash_attn  # pyright: ignore[reportPrivateUsage]
    if requested is None and device.device_type() == "cuda" and flash and supported:
        model.set_attn_implementation("flash_attention_2")
    chosen = implementation(model)
    if requested is None and distributed.rank() == 0:
        log.info("attention: %s (--attn-implementation chooses another)", chosen)
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    supported = model._supports_attention_backend and layers <= _KNOWN_LAYERS  # pyright: ignore[reportPrivateUsage]
    if chosen == "sdpa" and supported:
        AttentionInterface.register(NAME, attention)
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


def attention(  # noqa: PLR0913
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
        out = packed_attention.attend_rows(
            query, key, value, scale=scaling, sliding_window=sliding_window
        )
        return out, None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = packed_attention.attend_documents(
        q, k, v, documents, scale=scaling, sliding_window=sliding_window
    )
    return out[None], None
