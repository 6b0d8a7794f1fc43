"""The modules a Megatron layer is made of: Transformer Engine's where asked for, else Megatron's
local ones with our norm and core attention; or what ``--spec`` names."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from miles.backends.megatron_utils.attention import CoreAttention, SelfAttention
from miles.backends.megatron_utils.layers import RMSNorm
from miles.config.errors import ConfigError, Problem
from miles.core import distributed, logging, plugins

log = logging.get(__name__)

LayerSpec = ModuleSpec | TransformerBlockSubmodules
_NEEDED = "a ModuleSpec or TransformerBlockSubmodules"


def layer_spec(
    args: argparse.Namespace, transformer_config: Any, vp_stage: int | None = None
) -> LayerSpec:
    """What ``GPTModel(transformer_layer_spec=...)`` takes, for the layers of this pipeline stage.

    Raises ``ConfigError`` when ``--spec`` cannot be loaded or returns something else, and for a
    model that the local modules cannot compute.
    """
    if args.spec is not None:
        return _named_spec(args, transformer_config, vp_stage)
    return block_spec(transformer_config, vp_stage)


def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or MoE as ``moe_layer_freq`` says, and the norm
    after the last one. A function of ``--spec`` may start from it."""
    use_engine = config.transformer_impl == "transformer_engine"
    if use_engine and not HAVE_TE:
        remedy = "Transformer Engine cannot be imported: pass local, or install it"
        raise ConfigError([Problem("--transformer-impl", config.transformer_impl, remedy)])
    if not use_engine:
        _check_local(config)
        if config.num_moe_experts and config.moe_grouped_gemm and not vp_stage:
            _log_experts()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return block if use_engine else with_local_modules(block)


def with_local_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Megatron's local block with our norm and core attention in place of its own."""
    assert block.layer_specs is not None
    layers = [_with_local_layer(layer) for layer in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _with_local_layer(layer: ModuleSpec) -> ModuleSpec:
    parts: Any = layer.submodules
    attention = parts.self_attention
    modules = dataclasses.replace(
        attention.submodules,
        core_attention=CoreAttention,
        q_layernorm=_norm(attention.submodules.q_layernorm),
        k_layernorm=_norm(attention.submodules.k_layernorm),
    )
    return dataclasses.replace(
        layer,
        submodules=dataclasses.replace(
            parts,
            input_layernorm=RMSNorm,
            pre_mlp_layernorm=RMSNorm,
            self_attention=dataclasses.replace(attention, module=SelfAttention, submodules=modules),
        ),
    )


def _norm(module: Any) -> Any:
    return module if module in (IdentityOp, L2Norm) else RMSNorm


def _check_local(config: Any) -> None:
    problems: list[Problem] = []
    engine = "needs Transformer Engine; the local modules have no such layer"
    if config.normalization != "RMSNorm":
        remedy = "without Transformer Engine only RMSNorm is there"
        problems.append(Problem("--normalization", config.normalization, remedy))
    if config.multi_latent_attention:
        problems.append(Problem("--multi-latent-attention", None, engine))
    if config.experimental_attention_variant is not None:
        name = config.experimental_attention_variant
        remedy = f"{engine}: pass a --spec that builds it"
        problems.append(Problem("--experimental-attention-variant", name, remedy))
    if config.fp8:
        problems.append(Problem("--fp8-format", config.fp8, engine))
    if problems:
        raise ConfigError(problems)


def _log_experts() -> None:
    if distributed.rank() == 0:
        log.info("experts run one after the other: grouped GEMM needs Transformer Engine")


def find_spec(words: Sequence[str]) -> Any:
    """What ``--spec module name`` names: a spec, or a function of ``(args, config, vp_stage)`` that
    returns one. Raises ``ConfigError``."""
    given = " ".join(words)
    if len(words) != 2:
        raise ConfigError([Problem("--spec", given, "takes a module and a name in it")])
    try:
        found = plugins.load_attribute(".".join(words))
    except plugins.PluginError as error:
        raise ConfigError([Problem("--spec", given, str(error))]) from error
    if not isinstance(found, LayerSpec) and not callable(found):
        remedy = f"names a {type(found).__name__}; needed is {_NEEDED}, or a function that gives it"
        raise ConfigError([Problem("--spec", given, remedy)])
    return found


def _named_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> LayerSpec:
    spec = find_spec(args.spec)
    if not isinstance(spec, LayerSpec):
        spec = spec(args, config, vp_stage)
    if isinstance(spec, ModuleSpec) and not HAVE_TE and _is_layer(spec.module):
        # For a single layer Megatron would choose the final norm, and has none of its own.
        layers = [spec] * get_num_layers_to_build(config, vp_stage)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
    if not isinstance(spec, LayerSpec):
        remedy = f"gives a {type(spec).__name__}; needed is {_NEEDED}"
        raise ConfigError([Problem("--spec", " ".join(args.spec), remedy)])
    return spec


def _is_layer(module: Any) -> bool:
    return isinstance(module, type) and issubclass(module, BaseTransformerLayer)
