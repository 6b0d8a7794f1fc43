"""Parameters that a sleeping trainer does not keep (--rematerialize-param-from-master-weight)."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from miles.backends.megatron_utils.optimizer import Optimizer
from miles.config.offload import OffloadConfig
from miles.core import logging

_CHECKED_SLEEPS = 2

log = logging.get(__name__)


class RebuiltWeights:
    """The parameters that the optimizer's master weights can give back."""

    def __init__(
        self,
        config: OffloadConfig,
        mastered: Callable[[], Mapping[str, Tensor]],
        optimizer: Optimizer,
    ) -> None:
        """``mastered`` names the parameters that are rounded copies of master weights."""
        self._on = config.rematerialize_param_from_master_weight
        self._checks = config.check_rematerialize_param_from_master_weight
        self._mastered, self._optimizer = mastered, optimizer
        self._digests: dict[str, str] = {}
        self._num_sleeps = 0

    def derived(self) -> Mapping[str, Tensor]:
        """What need not be kept; nothing unless it was asked for."""
        return self._mastered() if self._on else {}

    def note(self) -> None:
        """Before a sleep: remember what the parameters are, in the sleeps that are checked."""
        self._num_sleeps += 1
        if self._checks and self._num_sleeps <= _CHECKED_SLEEPS:
            self._digests = {name: _digest(value) for name, value in self._mastered().items()}

    def rebuild(self) -> None:
        """Make the parameters anew. Collective; raises ``RuntimeError`` if a check fails."""
        self._optimizer.restore_parameters()
        if not self._digests:
            return
        wrong = [n for n, value in self._mastered().items() if self._digests[n] != _digest(value)]
        self._digests = {}
        if wrong:
            raise RuntimeError(
                f"--rematerialize-param-from-master-weight: {len(wrong)} parameters are not what "
                f"they were before the sleep: {', '.join(wrong[:3])}"
            )
        log.info("parameters made from master weights equal those before the sleep")


def _digest(tensor: Tensor) -> str:
    # A copy: PyTorch does not resize storages that numpy has seen.
    host = tensor.detach().to("cpu", copy=True).contiguous()
    return hashlib.sha256(host.view(-1).view(torch.uint8).numpy()).hexdigest()
