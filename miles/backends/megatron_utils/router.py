"""The MoE router with auxiliary losses that do not depend on how tokens lie on ranks.

Megatron weights the load-balancing loss of a micro-batch by the tokens of the rank times the number
of ranks, which is the micro-batch's number of tokens only where no rank holds padding. Here the
weight is that number, summed over the ranks: the gradient of a step is then, with the scale that
``PolicyModel`` sets, the coefficient times the token-weighted mean over the micro-batches. The same
means are the metrics of the step, one value for all layers and without the coefficient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from miles.core import device

LOAD_BALANCING, Z_LOSS = "moe_load_balancing_loss", "moe_z_loss"
"""Names of the losses among a step's statistics."""


class Router(TopKRouter):
    """``TopKRouter`` whose losses leave padding out exactly."""

    _num_tokens: Tensor | None = None
    """Tokens of the micro-batch in the forward pass that is running, over the ranks that share it;
    0 in a filler."""
    _padding: Tensor | None = None
    _sums: dict[str, Tensor]
    """float64 scalars by name: losses of this rank's tokens in the step so far, each times the
    tokens that it is a mean over."""

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
            self._add(LOAD_BALANCING, aux_loss / aux_loss_coeff * self._num_tokens)
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
        padding, charged = self._padding, self.config.moe_z_loss_coeff is not None
        if padding is not None and charged and self.training and torch.is_grad_enabled():
            self._add(Z_LOSS, (logits.logsumexp(-1).square() * ~padding).sum())
        return super().apply_z_loss(logits, padding)

    def take_sums(self) -> dict[str, Tensor]:
        """``_sums``, which begin anew."""
        taken, self._sums = self._sums, {}
        return taken

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().to(torch.float64)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # One column, to go with the experts' of the routing map.
        mask = None if self._padding is None else self._padding[:, None]
        super()._apply_expert_bias(routing_map, mask)


def use_exact_routers(chunks: Sequence[nn.Module]) -> None:
    """Make every router of a built model a ``Router``, whatever layer spec it comes from."""
    routers: list[Any] = [m for c in chunks for m in c.modules() if type(m) is TopKRouter]
    for router in routers:
        router.__class__ = Router
        router._sums = {}


def loss_names(config: Any) -> tuple[str, ...]:
    """Losses that the routers of a model with this ``TransformerConfig`` have."""
    if config.num_moe_experts is None:
        return ()
    balances = config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff > 0
    rows = ((LOAD_BALANCING, balances), (Z_LOSS, config.moe_z_loss_coeff is not None))
    return tuple(name for name, there in rows if there)


def mean_losses(chunks: Sequence[nn.Module], config: Any, num_tokens: float) -> dict[str, float]:
    """The losses of the step that was run: means over its ``num_tokens`` and over the model's
    layers with experts, without coefficients. Collective over all ranks, each of which holds tokens
    or layers that no other does; the same on every rank."""
    names = loss_names(config)
    if not names:
        return {}
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, Router)]
    taken = [router.take_sums() for router in routers]
    zero = torch.zeros((), dtype=torch.float64, device=device.current_device())
    sums = torch.stack([sum((t[name] for t in taken if name in t), zero) for name in names])
    dist.all_reduce(sums)
    means = sums / (num_tokens * num_moe_layers(config))
    return dict(zip(names, means.tolist(), strict=True))


def num_moe_layers(config: Any) -> int:
    """Of the whole model that this ``TransformerConfig`` describes."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return len(range(0, config.num_layers, pattern))
    return sum(pattern)
