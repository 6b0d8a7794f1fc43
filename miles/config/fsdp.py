"""The FSDP backend."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """FSDP: sharding and precision of the PyTorch FSDP2 backend."""

    dp_replicate_size: Annotated[
        int, Doc("Replicas of hybrid sharding; must divide the number of ranks.")
    ] = 1
    context_parallel_size: Annotated[
        int, Doc("Refused above 1: this backend has no context parallelism."), Flag(shared=True)
    ] = 1
    gradient_checkpointing: Annotated[bool, Doc("Recompute activations in the backward pass.")] = (
        False
    )
    fp16: Annotated[bool, Doc("Compute in fp16 instead of bf16."), Flag(shared=True)] = False
    fp32: Annotated[bool, Doc("Compute in fp32 instead of bf16.")] = False
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
