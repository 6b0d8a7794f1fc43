"""The FSDP backend."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """FSDP: what only the PyTorch FSDP2 backend has."""

    dp_replicate_size: Annotated[
        int, Doc("Replicas of hybrid sharding; must divide the number of ranks.")
    ] = 1
    gradient_checkpointing: Annotated[bool, Doc("Recompute activations in the backward pass.")] = (
        False
    )
    accumulate_sharded_gradients: Annotated[
        bool,
        Doc(
            "Reduce the gradients of every micro-batch to this rank's shards, instead of adding "
            "whole ones up (4 bytes a parameter of the model) and reducing once a step."
        ),
    ] = False
    keep_fp32_master: Annotated[
        bool, Doc("Keep master weights in fp32; off: weights in the checkpoint's dtype.")
    ] = True
    attn_implementation: Annotated[
        str | None,
        Doc(
            "Attention of transformers; by default flash_attention_2 on CUDA when installed, else "
            "sdpa."
        ),
    ] = None
    fsdp_cpu_offload: Annotated[
        bool,
        Doc(
            "Keep sharded parameters, gradients and optimizer state in host memory; the optimizer "
            "runs there."
        ),
    ] = False
    fsdp_cpu_backend: Annotated[
        Literal["gloo"], Doc("Process-group backend of --fsdp-cpu-offload's host tensors.")
    ] = "gloo"
