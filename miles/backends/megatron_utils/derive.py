"""Arguments that Megatron demands and that Miles knows: no user has to give them.

They come before the user's own, which therefore win.
"""

from collections.abc import Collection
from typing import Any

from miles.config.root import MilesConfig
from miles.core import hf

VOCABULARY_MULTIPLE = 8
"""Padded vocabularies are a multiple of this times TP: enough for tensor cores, and small enough
that released vocabularies (multiples of 64 or 128) need no padding in common layouts."""

UNKNOWN_CONTEXT = 1 << 20
"""Positions of a model whose config does not bound them; RoPE needs no table of them."""


def defaults() -> list[str]:
    """What depends on no model."""
    return [
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        "--use-distributed-optimizer",
        *("--ckpt-format", "torch_dist"),
        *("--tokenizer-type", "NullTokenizer"),
        *("--make-vocab-size-divisible-by", str(VOCABULARY_MULTIPLE)),
    ]


def from_model(config: MilesConfig, hf_config: Any, given: Collection[str]) -> list[str]:
    """Lengths, vocabulary and routing of a transformers config, less what is ``given``."""
    positions = hf.context_length(hf_config) or UNKNOWN_CONTEXT
    vocabulary = hf_config.get_text_config().vocab_size
    argv = ["--vocab-size", str(vocabulary)]
    # Megatron wants a whole number of chunks for context parallelism; micro-batches have their own
    # lengths.
    chunks = 2 * config.cluster.context_parallel_size
    if "max-position-embeddings" not in given:
        positions = max(positions // chunks, 1) * chunks
        argv += ["--max-position-embeddings", str(positions)]
    argv += ["--seq-length", str(chunks)]
    if "num-experts" in given or _has_experts(hf_config):
        argv += _ROUTING
    return argv


_ROUTING = (
    # The other common one needs micro-batches of one length on all ranks.
    *("--moe-token-dispatcher-type", "alltoall"),
    # As in inference and in transformers: nothing but the loss of the algorithm trains the router.
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"),
    *("--moe-router-dtype", "fp32"),
)


def _has_experts(hf_config: Any) -> bool:
    return bool(hf_config.get_text_config().to_dict().get("num_experts"))
