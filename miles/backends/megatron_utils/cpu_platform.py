"""Lets the released megatron-core run on a machine without CUDA, where the CPU stands for the GPU.

Megatron names ``torch.cuda`` and ``device="cuda"`` throughout. Each patched function looks at its
caller: Megatron gets the CPU's answer, every other caller gets PyTorch's own, so that
``torch.cuda.is_available()``, ``torch.accelerator`` and other libraries see the machine as it is.
"""

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateUsage]

from miles.backends.megatron_utils import uneven

_CPU = torch.device("cpu")

_DEVICE = types.SimpleNamespace(
    name="cpu", major=9, minor=0, multi_processor_count=1, total_memory=1 << 34
)
"""Megatron's arguments need a compute capability; 9 asks for no special case of older GPUs."""

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


class _Event:
    """Work on a CPU is done when the call returns: there is nothing to record or to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        del other
        return 0.0


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event


_STREAM = _Stream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _zero(*args: Any, **kwargs: Any) -> int:
    del args, kwargs
    return 0


def _uncompiled(model: Any = None, **kwargs: Any) -> Any:
    """``torch.compile`` would need a C++ compiler, and minutes of a short run."""
    del kwargs
    return (lambda function: function) if model is None else model


def _stream_scope(stream: Any = None) -> contextlib.AbstractContextManager[None]:
    """Megatron enters one of them several times."""
    del stream
    return contextlib.nullcontext()


def _cuda_rng_state(device: Any = None, **kwargs: Any) -> torch.Tensor:
    del device, kwargs
    return torch.get_rng_state()


def _set_cuda_rng_state(state: torch.Tensor, device: Any = None, **kwargs: Any) -> None:
    del device, kwargs
    torch.set_rng_state(state)


def _moved(value: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.cuda`` and ``Module.cuda`` where the CPU is the device."""
    del args, kwargs
    return value


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "compile": _uncompiled,
    "cuda.current_device": lambda: _CPU,
    "cuda.current_stream": lambda device=None: _STREAM,
    "cuda.default_stream": lambda device=None: _STREAM,
    "cuda.device_count": lambda: 1,
    "cuda.empty_cache": _nothing,
    "cuda.get_device_capability": lambda device=None: (_DEVICE.major, _DEVICE.minor),
    "cuda.get_device_name": lambda device=None: _DEVICE.name,
    "cuda.get_device_properties": lambda device=None: _DEVICE,
    "cuda.get_rng_state": _cuda_rng_state,
    "cuda.is_current_stream_capturing": lambda: False,
    "cuda.manual_seed": torch.manual_seed,
    "cuda.max_memory_allocated": _zero,
    "cuda.max_memory_reserved": _zero,
    "cuda.device_memory_used": _zero,
    "cuda.memory_allocated": _zero,
    "cuda.memory_reserved": _zero,
    "cuda.memory_stats": lambda device=None: {},
    "cuda.nvtx.range_pop": _nothing,
    "cuda.nvtx.range_push": _nothing,
    "cuda.random.get_rng_state": _cuda_rng_state,
    "cuda.random.set_rng_state": _set_cuda_rng_state,
    "cuda.reset_peak_memory_stats": _nothing,
    "cuda.set_device": _nothing,
    "cuda.set_rng_state": _set_cuda_rng_state,
    "cuda.set_stream": _nothing,
    "cuda.stream": _stream_scope,
    "cuda.synchronize": _nothing,
    "nn.Module.cuda": _moved,
    "Tensor.cuda": _moved,
}
"""Functions under ``torch`` that answer Megatron differently."""

CLASSES: Mapping[str, type] = {"cuda.Event": _Event, "cuda.Stream": _Stream}
"""Classes under ``torch`` that nobody can construct without CUDA."""

_state = {"torch": False, "megatron": False}


def install() -> None:
    """Make ``import megatron.core`` and everything after it work here; call it before the import.

    Where CUDA is available it does nothing.
    """
    if torch.cuda.is_available():
        return
    if not _state["torch"]:
        _state["torch"] = True
        _patch_torch()
    patch_megatron()


def patch_megatron() -> None:
    """Replace the functions of Megatron that no patched ``torch`` function reaches."""
    if torch.cuda.is_available() or _state["megatron"]:
        return
    _state["megatron"] = True
    for module, name, replacement in megatron_functions():
        setattr(module, name, replacement)
    # Megatron warns when code between its random states draws from the host's: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.msg
    )


def megatron_functions() -> list[tuple[types.ModuleType, str, Callable[..., Any]]]:
    """What :func:`patch_megatron` replaces: module, name, replacement."""
    # Importing Megatron before torch is patched would bind the originals.
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    gather, scatter = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
    return [
        (mappings, gather, uneven.gather(getattr(mappings, gather))),
        (mappings, scatter, uneven.reduce_scatter(getattr(mappings, scatter))),
        (random, "_get_cuda_rng_state", _cuda_rng_state),
        (random, "_set_cuda_rng_state", _set_cuda_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
    ]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts split sizes only when they come from a GPU; gloo needs host numbers too."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _patch_torch() -> None:
    # ``with torch.device(...)`` knows the factories by identity, and looks them up only once: it
    # must know the originals, which the replacements call.
    _device_constructors()
    for path, replacement in FUNCTIONS.items():
        owner, name = resolve(path)
        setattr(owner, name, _for_megatron(getattr(owner, name), replacement))
    for path, replacement in CLASSES.items():
        setattr(*resolve(path), replacement)
    for name in _FACTORIES:
        setattr(torch, name, _cpu_factory(getattr(torch, name)))
    torch.Tensor.to = _cpu_to(torch.Tensor.to)  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # pyright: ignore[reportAttributeAccessIssue]


def resolve(path: str) -> tuple[Any, str]:
    """The object under ``torch`` that holds the last name of a dotted path, and that name."""
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, torch), name


def _called_by_megatron() -> bool:
    """Whether the caller of the function that asks is Megatron's code."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")  # pyright: ignore[reportPrivateUsage]


def _for_megatron(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if _called_by_megatron() else original)(*args, **kwargs)

    return function


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _cpu_factory(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        to_cuda = _is_cuda(kwargs.get("device"))
        if (to_cuda or kwargs.get("pin_memory")) and _called_by_megatron():
            kwargs.pop("pin_memory", None)
            if to_cuda:
                kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return factory


def _cpu_to(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        to_cuda = (args and _is_cuda(args[0])) or _is_cuda(kwargs.get("device"))
        if to_cuda and _called_by_megatron():
            if "device" in kwargs:
                kwargs["device"] = _CPU
            else:
                args = (_CPU, *args[1:])
        return original(self, *args, **kwargs)

    return to


def _cuda_type_name(original: Callable[..., Any]) -> Any:
    """Megatron's optimizers compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not args and not kwargs and _called_by_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_
