"""Adam with its state in host memory, for ``--optimizer-cpu-offload``: main parameters and moments
stay there; in each step gradients come to them and weights go back to the device.

``HybridDeviceOptimizer``, megatron-core 0.19's own class for the flag, is not used: fp32 parameters
that it leaves on the device never move (it looks for their gradients in another place than the
distributed optimizer puts them), no checkpoint of a model with fp32 parameters can be loaded into
it, and after a resume the step count of the device's part stands still.
"""

import functools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron_utils.fused_adam import MAIN, FusedAdam
from miles.core import device, host_memory


@dataclass(frozen=True)
class HostOptions:
    """How much is in host memory, and how it is reached."""

    fraction: float
    """Of the elements, at least; the parameter that crosses the limit goes with them."""
    overlap: bool
    """Copies run beside Adam: the next gradient comes and the last weights go meanwhile."""
    pin_gradients: bool
    pin_main: bool


class HostAdam(FusedAdam):
    """:class:`FusedAdam` that keeps the state of the first parameters in host memory and updates
    them there. The others, where there are any, have theirs beside them on the device."""

    def __init__(self, params: Any, *, host: HostOptions, **settings: Any) -> None:
        super().__init__(params, **settings)
        assert MAIN in self.state_dtypes, "weights are sent from main parameters"
        self._host = host
        self._lanes = _Lanes(host)
        self._in_host_memory: frozenset[int] | None = None

    @torch.no_grad()
    def allocate(self) -> None:
        """Give every parameter its state now: the main parameters are needed before a first step,
        and Megatron would read a checkpoint into tensors on the device where there are none."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)

    def in_host_memory(self, param: Tensor) -> bool:
        """Whether the state of this parameter is there."""
        if self._in_host_memory is None:
            self._in_host_memory = self._first_params()
        return id(param) in self._in_host_memory

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Make the parameters anew from main parameters, which all of them have to have."""
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param][MAIN])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The parameters may be others than before: the distributed optimizer puts in its shards
        and calls this."""
        self._in_host_memory = None
        super().load_state_dict(state_dict)

    def _first_params(self) -> frozenset[int]:
        params = [param for group in self.param_groups for param in group["params"]]
        wanted = self._host.fraction * sum(param.numel() for param in params)
        chosen: set[int] = set()
        placed = 0
        for param in params:
            if placed >= wanted:
                break
            chosen.add(id(param))
            placed += param.numel()
        return frozenset(chosen)

    def _empty_state(self, param: Tensor, name: str) -> Tensor:
        if not self.in_host_memory(param):
            return super()._empty_state(param, name)
        dtype = self.state_dtypes[name]
        if name == MAIN and self._host.pin_main:
            flat = host_memory.allocate(param.numel() * dtype.itemsize).view(dtype)
            return flat.view(param.shape)
        return torch.empty(param.shape, dtype=dtype, device="cpu")

    def _update_one_by_one(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        # The device works on its own part while the host waits for the first gradient.
        super()._update_one_by_one(group, [p for p in params if not self.in_host_memory(p)])
        hosted = [param for param in params if self.in_host_memory(param)]
        gradients = [gradient for p in hosted if (gradient := self._gradient(p)) is not None]
        for param, gradient in zip(hosted, self._lanes.fetch(gradients), strict=True):
            self._lanes.send(self._update_wide(group, param, gradient), param)
        self._lanes.join()


class _Lanes:
    """Copies between device and host: on streams of their own, or one after the other."""

    def __init__(self, options: HostOptions) -> None:
        beside = options.overlap and device.has_accelerator()
        self._ahead = 1 if options.overlap else 0
        """How many gradients are on their way while one is used."""
        self._down = torch.Stream() if beside else None
        self._up = torch.Stream() if beside else None
        self._pin = options.pin_gradients
        self._slots = [torch.empty(0, dtype=torch.uint8) for _ in range(self._ahead + 1)]

    def fetch(self, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        """Each gradient in host memory, in order and dtype; the next one may overwrite it."""
        self._reserve(max((gradient.nbytes for gradient in gradients), default=0))
        for lane in (self._down, self._up):
            if lane is not None:
                lane.wait_stream(torch.accelerator.current_stream())
        coming: deque[tuple[Tensor, torch.Event | None]] = deque()
        for number, gradient in enumerate(gradients):
            coming.append(self._begin(gradient, number % len(self._slots)))
            if len(coming) > self._ahead:
                yield _arrived(*coming.popleft())
        while coming:
            yield _arrived(*coming.popleft())

    def send(self, main: Tensor, param: Tensor) -> None:
        """Store the main parameter, rounded on the device, in the parameter.

        It is next changed by a step whose gradients were computed with these weights.
        """
        if self._up is None:
            param.copy_(main.to(param.device, non_blocking=True))
            return
        with self._up:
            param.copy_(main.to(param.device, non_blocking=True))

    def join(self) -> None:
        """What the device does from now on sees all that was sent."""
        if self._up is not None:
            torch.accelerator.current_stream().wait_stream(self._up)

    def _begin(self, gradient: Tensor, slot: int) -> tuple[Tensor, torch.Event | None]:
        place = self._slots[slot][: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        if self._down is None:
            place.copy_(gradient)
            return place, None
        with self._down:
            place.copy_(gradient, non_blocking=True)
        return place, self._down.record_event()

    def _reserve(self, num_bytes: int) -> None:
        for slot, buffer in enumerate(self._slots):
            if buffer.numel() < num_bytes:
                self._slots[slot] = torch.empty(0, dtype=torch.uint8)
                self._slots[slot] = _host_buffer(num_bytes, pinned=self._pin)


def _host_buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    if pinned:
        return host_memory.allocate(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _arrived(place: Tensor, event: torch.Event | None) -> Tensor:
    if event is not None:
        event.synchronize()
    return place


@contextmanager
def built_in(settings: Any) -> Generator[None]:
    """While Megatron builds its optimizers from these settings (an ``OptimizerConfig``), which
    change: under ``--optimizer-cpu-offload`` they are distributed optimizers over ``HostAdam``."""
    from megatron.core import optimizer

    if not settings.optimizer_cpu_offload:
        yield
        return
    host = HostOptions(
        fraction=settings.optimizer_offload_fraction,
        overlap=settings.overlap_cpu_optimizer_d2h_h2d,
        pin_gradients=settings.pin_cpu_grads,
        pin_main=settings.pin_cpu_params,
    )
    # What is left of the settings describes a precision-aware Adam that holds its main parameters.
    settings.optimizer_cpu_offload = False
    settings.store_param_remainders = False
    before = optimizer.Adam
    optimizer.Adam = functools.partial(HostAdam, host=host)
    try:
        yield
    finally:
        optimizer.Adam = before
