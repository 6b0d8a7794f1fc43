"""One update of Adam on PyTorch's kernels, for whoever holds the state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from miles.core import device


def update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Any],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    settings: Mapping[str, Any],
    *,
    num_steps: int,
    decoupled: bool,
) -> None:
    """Change fp32 parameters and moments (means, squares) in place, all on one device.

    Adam (Kingma and Ba, arXiv:1412.6980), weight decay decoupled (Loshchilov and Hutter,
    arXiv:1711.05101) or not. ``settings`` are those of a parameter group: lr, betas, eps,
    weight_decay; ``num_steps`` counts the updates, this one included.
    """
    if not parameters:
        return
    fused = device.supports_fused_optimizer()
    where = parameters[0].device if fused else torch.device("cpu")
    before = torch.full((len(parameters),), num_steps - 1.0, device=where)
    beta1, beta2 = settings["betas"]
    means, squares = moments
    (adamw if decoupled else adam)(
        list(parameters),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(before.unbind()),
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=settings["lr"],
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        maximize=False,
    )
