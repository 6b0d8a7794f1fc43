import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.backends.megatron_utils import cpu_platform
from miles.core import device

CUDA = torch.cuda

pytestmark = pytest.mark.skipif(device.has_accelerator(), reason="the platform is the CPU's")


def as_megatron(source: str) -> Any:
    """What an expression gives where Megatron's code evaluates it."""
    return eval(source, {"__name__": "megatron.core.example", "torch": torch})


@pytest.mark.parametrize("path", sorted(cpu_platform.FUNCTIONS))
def test_each_patched_function_of_torch_exists_in_the_installed_version(path: str) -> None:
    owner, name = cpu_platform.resolve(path)
    original = getattr(owner, name).__wrapped__
    assert callable(original)
    assert not (getattr(original, "__module__", None) or "").startswith("miles.")


def test_each_patched_class_of_torch_exists_in_the_installed_version() -> None:
    for path in cpu_platform.CLASSES:
        assert isinstance(getattr(importlib.import_module("torch.cuda.streams"), path[5:]), type)


@pytest.mark.parametrize("patch", cpu_platform.megatron_functions(), ids=lambda patch: patch[1])
def test_each_patched_function_of_megatron_is_still_called_by_its_module(
    patch: tuple[types.ModuleType, str, Callable[..., Any]],
) -> None:
    module, name, replacement = patch
    source = inspect.getsource(module)
    assert f"def {name}(" in source or f"    {name}," in source
    assert source.replace(f"def {name}(", "").count(f"{name}(") >= 1
    assert getattr(module, name).__name__ == replacement.__name__


def test_other_callers_see_the_machine_as_it_is() -> None:
    assert not CUDA.is_available()
    assert CUDA.device_count() == 0
    assert device.device_type() == "cpu"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    for call in (
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.zeros(1).to("cuda"),
        lambda: torch.zeros(1).cuda(),
        CUDA.current_device,
        CUDA.get_rng_state,
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            call()


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(2, device='cuda')",
        "torch.zeros(2, device=torch.device('cuda', 0))",
        "torch.zeros(2, device=torch.cuda.current_device())",
        "torch.empty(2, pin_memory=True).zero_()",
        "torch.as_tensor([0.0, 0.0], device='cuda')",
        "torch.zeros(2).to('cuda')",
        "torch.zeros(2).to(device='cuda:0')",
        "torch.zeros(2).cuda()",
        "torch.nn.Linear(1, 2).cuda().bias.detach() * 0",
    ],
)
def test_megatron_gets_host_tensors_where_it_asks_for_the_gpu(source: str) -> None:
    tensor = as_megatron(source)
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [0.0, 0.0]


def test_a_move_to_the_gpu_keeps_the_other_arguments() -> None:
    assert as_megatron("torch.ones(1).to('cuda', torch.bfloat16)").dtype == torch.bfloat16
    assert as_megatron("torch.ones(1).to(device='cuda', dtype=torch.int8)").dtype == torch.int8
    assert torch.ones(1).to(torch.float64).dtype == torch.float64


def test_megatron_sees_the_type_names_of_gpu_tensors() -> None:
    assert as_megatron("torch.zeros(1).type()") == "torch.cuda.FloatTensor"
    assert as_megatron("torch.zeros(1, dtype=torch.bfloat16).type()") == "torch.cuda.BFloat16Tensor"
    assert as_megatron("torch.zeros(1).type(torch.int64).dtype") == torch.int64


def test_a_forked_random_state_of_megatron_is_the_seeded_one_and_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    tracker.add("weights", 5)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("weights"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("weights"):
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))
    assert not caplog.records


def test_nothing_is_compiled_for_megatron() -> None:
    def function(x: int) -> int:
        return x + 1

    megatron = {"__name__": "megatron.core.example", "torch": torch, "function": function}
    assert eval("torch.compile(function)", megatron) is function
    assert eval("torch.compile(dynamic=True)(function)", megatron) is function


@pytest.mark.parametrize("name", ["arange", "empty", "ones", "tensor", "zeros"])
def test_a_default_device_still_reaches_the_factories(name: str) -> None:
    """transformers builds models on the meta device and fills their buffers afterwards."""
    argument = [2.0] if name == "tensor" else 2
    with torch.device("meta"):
        assert getattr(torch, name)(argument).device.type == "meta"
