"""The random state of a rank: PyTorch's generators, and Megatron's named states of the device's."""

from argparse import Namespace
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import convert_cuda_rng_state
from megatron.training import initialize
from torch import Tensor

from miles.core import device

_TRACKED = "tracked."


def get() -> dict[str, Tensor]:
    """uint8 tensors by name, which nothing that happens later changes."""
    states: dict[str, Any] = _tracker().get_states()
    tracked: dict[str, Any] = {
        _TRACKED + name: convert_cuda_rng_state(state) for name, state in states.items()
    }
    return device.rng_state() | {name: state.clone() for name, state in tracked.items()}


def restore(state: dict[str, Tensor]) -> None:
    """Go back to what ``get`` returned."""
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(_tracker())
    _tracker().set_states(
        {
            name.removeprefix(_TRACKED): convert_cuda_rng_state(saved, to_graphable=graphable)
            for name, saved in state.items()
            if name.startswith(_TRACKED)
        }
    )
    device.set_rng_state(state)


def seed(value: int, args: Namespace) -> None:
    """Start anew as Megatron does at the beginning of a run. Any ``value >= 0``: Megatron itself
    refuses 0 and cannot add its offsets to the largest."""
    initialize._set_random_seed(  # pyright: ignore[reportPrivateUsage]
        1 + value % (2**31 - 1),
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
    )


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()
