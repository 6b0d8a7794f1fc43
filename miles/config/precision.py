"""The dtype that a model computes in."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision: what the trainer computes in; bf16 unless said otherwise."""

    fp16: Annotated[bool, Doc("Compute in fp16 instead of bf16."), Flag(shared=True)] = False
    fp32: Annotated[bool, Doc("Compute in fp32 instead of bf16.")] = False
