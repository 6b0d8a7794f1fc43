"""Whether an engine that was launched elsewhere is one that this job would have launched.

Compared is what changes the responses, their log-probs or the weight updates. What only makes an
engine faster or larger is its own affair: memory, cache, batch and graph sizes, kernels, schedule,
seeds, logging, ports.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.backends.sglang_utils.arguments import engine_dtype
from miles.backends.sglang_utils.package import choose_engine
from miles.backends.sglang_utils.refusals import UNQUANTIZED
from miles.config.root import MilesConfig
from miles.core import hf

NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
"""Entries of a ``config.json`` that say where it comes from."""

SAME_IN_EVERY_JOB: Mapping[str, tuple[Any, str]] = {
    "pp_size": (1, "an engine's GPUs are tensor-parallel ranks"),
    "skip_tokenizer_init": (False, "rewards and stop strings need the engine's text"),
    "disaggregation_mode": ("null", "every engine generates whole responses"),
    "is_embedding": (False, "every engine generates responses"),
    "preferred_sampling_params": (None, "sampling is that of the --rollout-... flags"),
    "quantization": (None, UNQUANTIZED),
    "torchao_config": ("", UNQUANTIZED),
    "modelopt_quant": (None, UNQUANTIZED),
    "quantize_and_serve": (False, UNQUANTIZED),
    "allow_auto_truncate": (False, "--rollout-max-prompt-len leaves long prompts out"),
}
"""Of SGLang's server arguments; an engine that does not have one is not asked for it."""


def differences(config: MilesConfig, info: Mapping[str, Any]) -> list[str]:
    """What an engine's ``/server_info`` says otherwise than the job, each with the reason."""
    cluster, rollout = config.cluster, config.rollout
    kind = "embedded" if info.get("engine") == "embedded" else "sglang"
    wanted: dict[str, tuple[Any, Any, str]] = {
        "engine": (kind, choose_engine(config)[0], "--rollout-engine"),
        "tp_size": (
            info.get("tp_size"),
            cluster.rollout_num_gpus_per_engine,
            "--rollout-num-gpus-per-engine",
        ),
        "dtype": (info.get("dtype"), engine_dtype(config), _source_of_dtype(config)),
    }
    if rollout.sglang_context_length is not None:
        wanted["context_length"] = (
            info.get("context_length"),
            rollout.sglang_context_length,
            "--sglang-context-length",
        )
    wanted |= {
        name: (info[name], value, reason)
        for name, (value, reason) in SAME_IN_EVERY_JOB.items()
        if name in info
    }
    found = [
        f"{name} is {theirs!r} and must be {ours!r} ({reason})"
        for name, (theirs, ours, reason) in wanted.items()
        if theirs != ours
    ]
    return [*_other_model(str(rollout.hf_checkpoint), info), *found, *_replicas(info)]


def _source_of_dtype(config: MilesConfig) -> str:
    if config.rollout.sglang_dtype != "auto":
        return "--sglang-dtype"
    return "--fp16" if config.precision.fp16 else "that of --hf-checkpoint"


def _other_model(ours: str, info: Mapping[str, Any]) -> list[str]:
    """Another path may lead to the same model: a copy, or a link."""
    theirs = str(info.get("model_path"))
    if theirs == ours or Path(theirs).resolve() == Path(ours).resolve():
        return []
    config = _model_config(theirs)
    if config is None:
        return [
            f"model_path is {theirs!r}, which cannot be read here, and must be {ours!r} "
            "(--hf-checkpoint)"
        ]
    if config != _model_config(ours):
        return [f"model_path is {theirs!r}, another model than {ours!r} (--hf-checkpoint)"]
    return []


def _model_config(path: str) -> dict[str, Any] | None:
    """What a directory says of its model; ``None`` where it is not one of this machine."""
    try:
        config = hf.read_config(path)
    except hf.CheckpointDirError:
        return None
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}


def _replicas(info: Mapping[str, Any]) -> list[str]:
    """Replicas with weights of their own would not all be given new ones."""
    size = info.get("dp_size", 1)
    if size == 1 or info.get("enable_dp_attention"):
        return []
    return [f"dp_size is {size!r} and must be 1 (without --enable-dp-attention); launch engines"]
