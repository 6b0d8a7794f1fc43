"""Which dtype a parameter is stored, computed and handed out in."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from miles.config.root import MilesConfig


@dataclass(frozen=True)
class Precision:
    """The policy of a run."""

    compute: torch.dtype
    """Of the gathered parameters and the activations."""
    fp32_master: bool
    frozen: bool = False
    """A reference: nothing rounds its weights but the gather, so they may be stored as gathered."""

    def stored(self, checkpoint: torch.dtype) -> torch.dtype:
        """Of the sharded parameters and the optimizer's moments."""
        if self.frozen:
            return self.compute
        return torch.float32 if self.fp32_master else self.exported(checkpoint)

    def exported(self, checkpoint: torch.dtype) -> torch.dtype:
        """Of weights that leave the trainer: the checkpoint's, but what was bf16 is fp16 in an fp16
        run, whose engines compute in fp16."""
        if self.compute == torch.float16 and checkpoint == torch.bfloat16:
            return torch.float16
        return checkpoint

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow without a loss scale."""
        return self.compute == torch.float16

    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """Gradients are reduced in fp32 whatever the compute dtype."""
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=torch.float32)


def make_precision(config: MilesConfig) -> Precision:
    """Read the precision flags; ``arguments.check`` has refused what cannot train."""
    compute = torch.bfloat16
    if config.precision.fp16:
        compute = torch.float16
    if config.precision.fp32:
        compute = torch.float32
    return Precision(compute, config.fsdp.keep_fp32_master)
