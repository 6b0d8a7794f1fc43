"""One loss scale for all parts of Megatron's optimizer (--fp16)."""

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor


class SharedScale(MegatronGradScaler):
    """What every part divides its gradients by.

    Megatron gives each part, dense parameters and experts, a scaler that follows the part's own
    overflows, but scales the loss with the first part's: once they differ, so do the gradients.
    """

    def __init__(self, scaler: Any) -> None:
        """``scaler``: the ``MegatronGradScaler`` that knows the scale."""
        self._scaler = scaler
        self._overflowed = False

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied with."""
        return self._scaler.scale

    @property
    def inv_scale(self) -> Tensor:
        """What gradients are multiplied with."""
        return self._scaler.inv_scale

    def update(self, found_inf: bool) -> None:
        """One part has looked at its gradients: the others still have to divide by this scale."""
        self._overflowed |= found_inf

    def end_step(self) -> None:
        """All parts have looked at theirs: the next step has the next scale."""
        self._scaler.update(self._overflowed)
        self._overflowed = False

    def state_dict(self) -> Any:
        """Of the scaler itself: the same for every part."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every part brings the same."""
        self._scaler.load_state_dict(state_dict)


def share_scale(parts: Sequence[Any]) -> SharedScale | None:
    """Give all parts of an optimizer one scale; ``None`` where the loss is not scaled."""
    scaled = [
        part for part in parts if isinstance(part, MixedPrecisionOptimizer) and part.grad_scaler
    ]
    if not scaled:
        return None
    shared = SharedScale(scaled[0].grad_scaler)
    for part in scaled:
        part.grad_scaler = shared
    return shared
