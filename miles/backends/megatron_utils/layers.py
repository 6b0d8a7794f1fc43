"""The norm of Megatron's local layers, which without Transformer Engine or Apex has none that
works with sequence parallelism."""

from typing import Any

import torch
from torch import Tensor, nn

from miles.core import device


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with Megatron's constructor.

    The order of casts is that of transformers: ``Qwen3RMSNorm`` (round, then scale), and with
    ``layernorm_zero_centered_gamma`` that of ``Qwen3NextRMSNorm`` (scale by ``1 + weight`` in fp32,
    then round), so that the two give the same bits. Zhang and Sennrich, arXiv:1910.07467.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        where = "cpu" if config.use_cpu_initialization else device.current_device()
        weight = torch.empty(hidden_size, dtype=config.params_dtype, device=where)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()
        # Each tensor-parallel rank then sees other tokens: Megatron sums the gradients of
        # parameters that carry this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., hidden_size]`` in any float dtype; returns the same shape and dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).to(hidden.dtype)
        return self.weight * wide.to(hidden.dtype)
