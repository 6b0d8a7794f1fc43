"""The two ways to hold a layer's experts: transformers keeps them in one parameter for all, most
checkpoints keep a matrix for each expert.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True)
class ExpertSlice:
    """One matrix of a checkpoint as part of the parameter that holds all experts."""

    name: str
    """In the checkpoint."""
    expert: int
    start: int
    stop: int
    """Rows of the expert's part."""

    def of(self, fused: "Tensor") -> "Tensor":
        """A view ``[rows, columns]`` of the fused parameter ``[experts, rows, columns]``."""
        return fused[self.expert, self.start : self.stop]


def expert_slices(
    name: str, shape: Collection[int], stored: Collection[str]
) -> tuple[ExpertSlice, ...]:
    """What the checkpoint, which holds the names ``stored``, has instead of the parameter ``name``.

    ``gate_up_proj`` is ``[E, 2I, H]``, gate above up; ``down_proj`` is ``[E, H, I]``. Empty for any
    other parameter and for a checkpoint that is fused itself.
    """
    suffix = next((end for end in (_GATE_UP, _DOWN) if name.endswith(end)), None)
    if suffix is None or len(shape) != 3:
        return ()
    num_experts, num_rows, _ = shape
    kinds = ("gate_proj", "up_proj") if suffix == _GATE_UP else ("down_proj",)
    rows = num_rows // len(kinds)
    prefix = f"{name.removesuffix(suffix)}.experts"
    found = tuple(
        ExpertSlice(f"{prefix}.{expert}.{kind}.weight", expert, i * rows, (i + 1) * rows)
        for expert in range(num_experts)
        for i, kind in enumerate(kinds)
    )
    return found if found[0].name in stored else ()
