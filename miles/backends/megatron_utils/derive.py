"""Arguments that Megatron demands and that Miles knows: no user has to give them.

They come before the user's own, which therefore win.
"""

from collections.abc import Mapping, Set
from typing import Any

from miles.config.root import MilesConfig
from miles.core import hf

VOCABULARY_MULTIPLE = 8
"""Padded vocabularies are a multiple of this times TP: enough for tensor cores, and small enough
that released vocabularies (multiples of 64 or 128) need no padding in common layouts."""

UNKNOWN_CONTEXT = 1 << 20
"""Positions of a model whose config does not bound them; RoPE needs no table of them."""


INITIAL_LOSS_SCALE = 1 << 16
"""Of fp16 training, in both backends. From Megatron's own 2**32 every run would skip its first
steps until the scale has come down."""


def defaults(config: MilesConfig) -> list[str]:
    """What depends on no model."""
    fp16 = ("--initial-loss-scale", str(INITIAL_LOSS_SCALE)) if config.precision.fp16 else ()
    return [
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        "--use-distributed-optimizer",
        *("--ckpt-format", "torch_dist"),
        *("--tokenizer-type", "NullTokenizer"),
        *("--make-vocab-size-divisible-by", str(VOCABULARY_MULTIPLE)),
        *fp16,
    ]


def from_flags(given: Set[str]) -> list[str]:
    """What Megatron demands beside flags that are ``given`` (names without dashes)."""
    if "optimizer-cpu-offload" in given and "use-precision-aware-optimizer" not in given:
        # Of an fp32 state and fp32 gradients, its defaults, it is the same Adam.
        return ["--use-precision-aware-optimizer"]
    return []


def from_model(
    config: MilesConfig, hf_config: Any, flags: Mapping[str, str | bool], given: Set[str]
) -> list[str]:
    """Lengths, vocabulary and routing of a model with these architecture ``flags``, less what is
    ``given`` (names without dashes)."""
    # Megatron wants a whole number of chunks for context parallelism; micro-batches have their own
    # lengths.
    chunks = 2 * config.cluster.context_parallel_size
    positions = hf.context_length(hf_config) or UNKNOWN_CONTEXT
    argv = [
        *("--vocab-size", str(flags["vocab-size"])),
        *("--max-position-embeddings", str(max(positions // chunks, 1) * chunks)),
        *("--seq-length", str(chunks)),
    ]
    if "num-experts" in flags:
        argv += _ROUTING
        if not given & _AUXILIARY:
            argv += _NO_AUXILIARY_LOSS
    return argv


_ROUTING = (
    *("--moe-router-dtype", "fp32"),
    # The other common one needs micro-batches of one length on all ranks.
    *("--moe-token-dispatcher-type", "alltoall"),
)
_AUXILIARY = frozenset(("moe-router-load-balancing-type", "moe-aux-loss-coeff"))
_NO_AUXILIARY_LOSS = (
    # As in inference and in transformers: nothing but the loss of the algorithm trains the router.
    *("--moe-router-load-balancing-type", "none"),
    *("--moe-aux-loss-coeff", "0"),
)
