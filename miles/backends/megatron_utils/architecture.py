"""A Hugging Face ``config.json`` as Megatron's architecture flags, and the two held together.

One function a family; a new family is one more entry of ``FAMILIES``.
"""

import argparse
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from miles.config.errors import Problem
from miles.core import hf

Flags = dict[str, str | bool]
"""Flag without its dashes -> value as typed, ``True`` for a switch; none: Megatron's default."""


class UnknownArchitecture(ValueError):
    """A model that these flags cannot describe; the message says why."""


ARCHITECTURE_FLAGS = frozenset(
    [
        "add-qkv-bias",
        "apply-layernorm-1p",
        "apply-query-key-layer-scaling",
        "apply-residual-connection-post-layernorm",
        "attention-output-gate",
        "disable-bias-linear",
        "ffn-hidden-size",
        "glu-linear-offset",
        "group-query-attention",
        "hidden-size",
        "kv-channels",
        "moe-ffn-hidden-size",
        "moe-layer-freq",
        "moe-router-enable-expert-bias",
        "moe-router-group-topk",
        "moe-router-num-groups",
        "moe-router-pre-softmax",
        "moe-router-score-function",
        "moe-router-topk",
        "moe-router-topk-scaling-factor",
        "moe-shared-expert-gate",
        "moe-shared-expert-intermediate-size",
        "multi-latent-attention",
        "no-rope-freq",
        "norm-epsilon",
        "normalization",
        "num-attention-heads",
        "num-experts",
        "num-layers",
        "num-query-groups",
        "openai-gelu",
        "position-embedding-type",
        "qk-l2-norm",
        "qk-layernorm",
        "quick-geglu",
        "rope-scaling-factor",
        "rotary-base",
        "rotary-interleaved",
        "rotary-percent",
        "rotary-seq-len-interpolation-factor",
        "softmax-type",
        "squared-relu",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "use-rope-scaling",
        "use-rotary-position-embeddings",
        "vocab-size",
        "window-size",
    ]
)
"""Without dashes: what a checkpoint fixes. A command line gives all that differ from Megatron's
defaults, or none."""

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What ``--use-rope-scaling`` has built in (megatron/core/models/common/embeddings)."""

QWEN3_5_SPEC = "miles_plugins.models.qwen3_5 get_qwen3_5_spec"


def flags_of(hf_config: Any) -> Flags:
    """The flags of a transformers config. Raises ``UnknownArchitecture``."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise UnknownArchitecture(
            f"model_type {hf_config.model_type!r} has no conversion to Megatron; those that have: "
            f"{', '.join(FAMILIES)} (--train-backend fsdp trains any model of transformers; "
            "a --spec module may bring one)"
        )
    return family(hf.text_config(hf_config))


def to_argv(flags: Mapping[str, str | bool]) -> list[str]:
    """``{"num-layers": "2", "swiglu": True}`` -> ``--num-layers 2 --swiglu``."""
    argv: list[str] = []
    for name, value in flags.items():
        argv.append(f"--{name}")
        argv += [] if value is True else str(value).split(" ")
    return argv


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """What Megatron's parser makes of the architecture."""

    own: argparse.Namespace
    """Of the user's command line alone."""
    filled: argparse.Namespace
    """Of the checkpoint's flags, overruled by the user's."""
    checkpoint: argparse.Namespace
    """Of ``flags_of`` alone."""


def compare(args: Namespaces, given: Set[str]) -> list[Problem]:
    """One problem with what the flags ``given`` (names without dashes) say otherwise than the
    checkpoint.

    What they leave out counts where any of them fits the model: there a description of it has
    gaps, elsewhere they are strays.
    """
    own, filled, wanted = map(_effective, (args.own, args.filled, args.checkpoint))
    said = {_FOLDED.get(name, name) for name in given & ARCHITECTURE_FLAGS}
    wrong = {name: filled[name] for name in filled if name in said and filled[name] != wanted[name]}
    missing = {
        name: own[name]
        for name in own.keys() - said
        if own[name] != wanted[name] and wanted[name] not in (None, False)
    }
    fits = any(filled[name] == wanted[name] and wanted[name] is not None for name in said)
    found = wrong if wrong and not fits else {**wrong, **missing}
    if not said or not found:
        return []
    names = sorted(found)
    differences = "; ".join(
        f"--{name}: {_text(found[name])}, must be {_text(wanted[name])}" for name in names
    )
    remedy = (
        "the architecture flags are not those of --hf-checkpoint (a flag that is not given has "
        f"Megatron's default): {differences}. Leave out every flag of the architecture to have "
        "them read from its config.json, or give the right ones "
        "(miles/utils/external_utils/model_args_utils.py prints them)"
    )
    flags = ", ".join(f"--{name}" for name in names)
    return [Problem(flags, tuple(found[name] for name in names), remedy)]


def _effective(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags mean together: values left out that Megatron derives, spellings made one."""
    values = vars(args)
    found = {name: values[dest] for name, dest in _DESTS.items()}
    found["disable-bias-linear"] = not args.add_bias_linear
    heads, hidden = args.num_attention_heads, args.hidden_size
    if args.use_rotary_position_embeddings:
        found["position-embedding-type"] = "rope"
    if not args.group_query_attention:
        found["num-query-groups"] = heads
    if args.kv_channels is None and heads and hidden:
        found["kv-channels"] = hidden // heads
    if not args.use_rope_scaling:
        found["rope-scaling-factor"] = None
    if args.add_bias_linear:
        found["add-qkv-bias"] = True
    if not args.num_experts:
        found |= {name: None for name in found if name.startswith("moe-") or name == "num-experts"}
    elif args.moe_ffn_hidden_size is None:
        found["moe-ffn-hidden-size"] = args.ffn_hidden_size
    return found


_SPELLED_OTHERWISE = {
    "disable-bias-linear": "add_bias_linear",
    "apply-layernorm-1p": "layernorm_zero_centered_gamma",
    "norm-epsilon": "layernorm_epsilon",
}
_FOLDED = {
    "use-rotary-position-embeddings": "position-embedding-type",
    "group-query-attention": "num-query-groups",
}
"""Part of another flag's meaning."""
_DESTS = {
    name: _SPELLED_OTHERWISE.get(name, name.replace("-", "_"))
    for name in sorted(ARCHITECTURE_FLAGS - _FOLDED.keys())
}


def _text(value: object) -> str:
    if value is True:
        return "given"
    return "not given" if value is None or value is False else str(value)


def transformer_flags(config: Any) -> Flags:
    """What all families have: RMSNorm, SwiGLU, RoPE, grouped queries, no biases; of a text config.

    Raises ``UnknownArchitecture`` for what these flags cannot say.
    """
    require(config, "hidden_act", "silu")
    flags: Flags = {
        "num-layers": str(config.num_hidden_layers),
        "hidden-size": str(config.hidden_size),
        "ffn-hidden-size": str(config.intermediate_size),
        "num-attention-heads": str(config.num_attention_heads),
    }
    if config.num_key_value_heads != config.num_attention_heads:
        flags["group-query-attention"] = True
        flags["num-query-groups"] = str(config.num_key_value_heads)
    flags |= {
        "kv-channels": str(_head_dim(config)),
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": str(config.rms_norm_eps),
        **_rotary(config),
        "vocab-size": str(config.vocab_size),
    }
    if not config.tie_word_embeddings:
        flags["untie-embeddings-and-output-weights"] = True
    return flags


def _head_dim(config: Any) -> int:
    # Qwen2's config class has no such field; others may leave it open.
    given = config.to_dict().get("head_dim")
    return int(given or config.hidden_size // config.num_attention_heads)


def _rotary(config: Any) -> Flags:
    rope: dict[str, Any] = config.rope_parameters
    base = float(rope["rope_theta"])
    if base != int(base):
        raise UnknownArchitecture(f"rope_theta {base} is not a whole number")
    flags: Flags = {"position-embedding-type": "rope", "rotary-base": str(int(base))}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return flags
    if kind != "llama3":
        raise UnknownArchitecture(f"rope_type {kind!r} is not supported (default and llama3 are)")
    different = {k: rope[k] for k, v in LLAMA3_SCALING.items() if rope[k] != v}
    if different:
        raise UnknownArchitecture(f"llama3 rope scaling with {different} is not supported")
    return {**flags, "use-rope-scaling": True, "rope-scaling-factor": str(float(rope["factor"]))}


def _llama(config: Any) -> Flags:
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    return transformer_flags(config)


def _qwen2(config: Any) -> Flags:
    require(config, "use_sliding_window", False)
    return {**transformer_flags(config), "add-qkv-bias": True}


def _qwen3(config: Any) -> Flags:
    require(config, "use_sliding_window", False)
    require(config, "attention_bias", False)
    return {**transformer_flags(config), "qk-layernorm": True}


def _qwen3_moe(config: Any) -> Flags:
    flags = {
        **_qwen3(config),
        "num-experts": str(config.num_experts),
        "moe-ffn-hidden-size": str(config.moe_intermediate_size),
        "moe-router-topk": str(config.num_experts_per_tok),
    }
    # Softmax over the chosen is softmax over all, renormalised.
    if not config.norm_topk_prob:
        flags["moe-router-pre-softmax"] = True
    sparse = [_is_sparse(config, layer) for layer in range(config.num_hidden_layers)]
    if not all(sparse):
        flags["moe-layer-freq"] = f"[{','.join(str(int(layer)) for layer in sparse)}]"
    return flags


def _is_sparse(config: Any, layer: int) -> bool:
    """As transformers' Qwen3MoeDecoderLayer decides."""
    dense = layer in (config.mlp_only_layers or ())
    return not dense and (layer + 1) % config.decoder_sparse_step == 0


def _qwen3_5(config: Any) -> Flags:
    require(config, "attention_bias", False)
    flags: Flags = {"spec": QWEN3_5_SPEC, **transformer_flags(config), "qk-layernorm": True}
    percent = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {
        **flags,
        "rotary-percent": str(float(percent)),
        # Norm weights are stored as their difference from 1.
        "apply-layernorm-1p": True,
        "attention-output-gate": True,
    }


def require(config: Any, field: str, value: object) -> None:
    """Raise ``UnknownArchitecture`` where a config has another value than the one that is known."""
    found = config.to_dict().get(field, value)
    if found != value:
        raise UnknownArchitecture(f"{field} {found!r} is not supported (only {value!r})")


FAMILIES: Mapping[str, Callable[[Any], Flags]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
}
"""transformers ``model_type`` -> flags of its text model."""
