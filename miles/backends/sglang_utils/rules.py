"""What must hold between the flags for SGLang to be the engine."""

from typing import Any

from miles.backends.sglang_utils import package
from miles.config.derived import needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.core import hf

ALL_SPARSE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures of which SGLang makes every layer one of experts, whatever their config says."""
PADDED_SIZES = ("intermediate_size", "moe_intermediate_size")
CPU_MULTIPLE = 32


def check(config: MilesConfig) -> list[Problem]:
    """Problems of a job whose engine is SGLang; none for any other."""
    if not needs_engines(config) or package.choose_engine(config)[0] != "sglang":
        return []
    if (missing := package.problem()) is not None:
        return [missing]
    model = _model_config(config)
    return [
        *_router_is_there(config),
        *_ranks_have_devices(config),
        *_layers_are_served(config, model),
        *_sizes_are_served(config, model),
        *_weights_can_be_checked(config, model),
    ]


def _model_config(config: MilesConfig) -> Any:
    """The model's transformers config; ``None`` where the check of the models has a complaint."""
    path = str(config.rollout.hf_checkpoint)
    try:
        hf.check_directory(path)
    except hf.CheckpointDirError:
        return None
    return hf.load_config(path).get_text_config()


def _router_is_there(config: MilesConfig) -> list[Problem]:
    if config.rollout.sglang_router_ip is not None or package.has_router():
        return []
    remedy = (
        "its router is not installed: pip install 'miles[sglang]' or sglang-router "
        f"({package.TESTED_VERSIONS}), or name one that runs already (--sglang-router-ip)"
    )
    return [problem(config, "rollout_engine", remedy=remedy)]


def _ranks_have_devices(config: MilesConfig) -> list[Problem]:
    if config.cluster.rollout_num_gpus_per_engine == 1 or package.has_accelerator():
        return []
    remedy = (
        "SGLang divides no model without an accelerator; use 1 and more engines "
        "(--rollout-num-gpus), or --rollout-engine embedded"
    )
    return [problem(config, "rollout_num_gpus_per_engine", remedy=remedy)]


def _layers_are_served(config: MilesConfig, model: Any) -> list[Problem]:
    """What SGLang makes of dense layers among those of experts is not the checkpoint."""
    if model is None or hf.architecture(model) not in ALL_SPARSE:
        return []
    dense: list[str] = []
    if model.mlp_only_layers:
        dense.append(f"mlp_only_layers {model.mlp_only_layers}")
    if model.decoder_sparse_step != 1:
        dense.append(f"decoder_sparse_step {model.decoder_sparse_step}")
    if not dense:
        return []
    remedy = (
        f"gives every layer of a {hf.architecture(model)} experts, and the model has dense ones "
        f"({', '.join(dense)}); use --rollout-engine embedded"
    )
    return [problem(config, "rollout_engine", remedy=remedy)]


def _sizes_are_served(config: MilesConfig, model: Any) -> list[Problem]:
    """Without an accelerator SGLang pads these sizes, and then cannot load experts; what it loads
    of other layers is not the checkpoint's any more."""
    if model is None or package.has_accelerator():
        return []
    sizes = {name: getattr(model, name, None) or 0 for name in PADDED_SIZES}
    padded = [f"{name} {size}" for name, size in sizes.items() if size % CPU_MULTIPLE]
    if not padded:
        return []
    remedy = (
        f"serves without an accelerator only sizes that are multiples of {CPU_MULTIPLE}, and the "
        f"model has {', '.join(padded)}; use --rollout-engine embedded"
    )
    return [problem(config, "rollout_engine", remedy=remedy)]


def _weights_can_be_checked(config: MilesConfig, model: Any) -> list[Problem]:
    if model is None or not config.weight_sync.check_weight_update_equal:
        return []
    if config.cluster.rollout_num_gpus_per_engine > 1:
        remedy = "SGLang's checksums of a divided model are not compared; leave the first out"
        dests = ("check_weight_update_equal", "rollout_num_gpus_per_engine")
        return [problem(config, *dests, remedy=remedy)]
    from miles.weight_sync.fused import TABLES

    name = hf.architecture(model)
    if name in TABLES:
        return []
    remedy = (
        f"SGLang's checksums are of fused parameters, and it is not known how it fuses {name!r} "
        f"(known: {', '.join(TABLES)}); leave it out, or use --rollout-engine embedded"
    )
    return [problem(config, "check_weight_update_equal", remedy=remedy)]
