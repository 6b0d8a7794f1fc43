"""The MoE router with auxiliary losses that do not depend on how tokens lie on ranks.

Megatron weights the load-balancing loss of a micro-batch by the tokens of the rank times the number
of ranks, which is the micro-batch's number of tokens only where no rank holds padding. Here the
weight is that number, summed over the ranks: the gradient of a step is then, with the scale that
``PolicyModel`` sets, the coefficient times the token-weighted mean over the micro-batches.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class Router(TopKRouter):
    """``TopKRouter`` whose losses leave padding out exactly."""

    _num_tokens: Tensor | None = None
    """Tokens of the micro-batch in the forward pass that is running, over the ranks that share it;
    0 in a filler."""
    _padding: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """``padding_mask`` (bool, tokens of this rank): True for what is no token of the batch."""
        if padding_mask is None:
            self._num_tokens = self._padding = None
            return super().routing(logits)
        self._padding = padding_mask.reshape(-1)
        self._num_tokens = (~self._padding).sum()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(self._num_tokens, group=self.tp_cp_group)
        # A mean over no token is not a number, and would stay one with a weight of 0.
        return super().routing(logits, padding_mask & (self._num_tokens > 0))

    def attach_and_log_load_balancing_loss(  # noqa: PLR0913
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        needs_dp_avg: bool = True,
        valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        if self._num_tokens is not None:
            # Megatron multiplies by the size of the group.
            valid_token_count = self._num_tokens / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss,
            aux_loss_name,
            reduce_group,
            needs_dp_avg,
            valid_token_count,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return super().apply_z_loss(logits, self._padding)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # One column, to go with the experts' of the routing map.
        mask = None if self._padding is None else self._padding[:, None]
        super()._apply_expert_bias(routing_map, mask)


def use_exact_routers(chunks: Sequence[nn.Module]) -> None:
    """Make every router of a built model a ``Router``, whatever layer spec it comes from."""
    for chunk in chunks:
        for module in chunk.modules():
            if type(module) is TopKRouter:
                module.__class__ = Router
