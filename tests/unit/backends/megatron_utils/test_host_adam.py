from typing import Any

import pytest
import torch
from torch import nn

from miles.backends.megatron_utils.host_adam import HostAdam, HostOptions

SHAPES = ((7, 5), (11,), (3, 4), (1,), (40,))
"""35, 11, 12, 1 and 40 of 99 elements."""
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def options(fraction: float = 1.0, *, overlap: bool = False) -> HostOptions:
    return HostOptions(fraction=fraction, overlap=overlap, pin_gradients=True, pin_main=True)


def made_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def host_adam(params: Any, host: HostOptions, **more: Any) -> HostAdam:
    return HostAdam(
        params, host=host, master_weights=True, use_decoupled_grad=True, **SETTINGS, **more
    )


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    """The gradient is where both kinds of Adam look for it."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = gradient if param.dtype == torch.float32 else None
            param.decoupled_grad = gradient  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_twenty_steps_equal_those_of_torch(fraction: float, overlap: bool) -> None:
    theirs, ours = made_params(), made_params()
    train(torch.optim.AdamW(theirs, **SETTINGS), theirs, range(20))
    train(host_adam(ours, options(fraction, overlap=overlap)), ours, range(20))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_weight_is_the_rounded_main_weight_which_trains_in_fp32(overlap: bool) -> None:
    exact = [nn.Parameter(param.detach().float()) for param in made_params(torch.bfloat16)]
    train(torch.optim.AdamW(exact, **SETTINGS), exact, range(20))
    ours = made_params(torch.bfloat16)
    optimizer = host_adam(ours, options(0.5, overlap=overlap))
    train(optimizer, ours, range(20))
    for param, main in zip(ours, exact, strict=True):
        kept = optimizer.get_unscaled_state(param, "master_param")
        torch.testing.assert_close(kept, main.detach(), atol=1e-6, rtol=1e-6)
        assert torch.equal(param, kept.bfloat16())


@pytest.mark.parametrize(
    ("fraction", "hosted"),
    [(0.01, 1), (0.35, 1), (0.36, 2), (0.59, 4), (0.6, 5), (1.0, 5)],
)
def test_the_first_parameters_go_to_host_memory_until_the_fraction_is_there(
    fraction: float, hosted: int
) -> None:
    """35, 46, 58 and 59 elements are less than or equal to 35.35, 46.46, 58.58 and 59.4 of 99."""
    params = made_params()
    optimizer = host_adam(params, options(fraction))
    found = [optimizer.in_host_memory(param) for param in params]
    assert found == [True] * hosted + [False] * (len(params) - hosted)


def test_the_fraction_is_of_the_parameters_that_are_put_in_later() -> None:
    """The distributed optimizer replaces the parameters by its shards, and loads."""
    optimizer = host_adam(made_params(), options(0.5))
    assert optimizer.in_host_memory(optimizer.param_groups[0]["params"][0])
    shards = [nn.Parameter(torch.zeros(size)) for size in (1, 1, 2)]
    optimizer.param_groups[0]["params"] = shards
    optimizer.load_state_dict(optimizer.state_dict())
    assert [optimizer.in_host_memory(shard) for shard in shards] == [True, True, False]


@pytest.mark.parametrize("moments", [{}, NARROW], ids=["fp32", "bf16"])
def test_a_loaded_state_continues_as_if_never_saved(moments: dict[str, Any]) -> None:
    whole = made_params(torch.bfloat16)
    optimizer = host_adam(whole, options(0.5, overlap=True), **moments)
    train(optimizer, whole, range(8))
    first = made_params(torch.bfloat16)
    before = host_adam(first, options(0.5), **moments)
    train(before, first, range(5))
    second = [nn.Parameter(param.detach().clone()) for param in first]
    after = host_adam(second, options(1.0), **moments)
    after.load_state_dict(before.state_dict())
    train(after, second, range(5, 8))
    assert after.param_groups[0]["step"] == 8
    for continued, expected in zip(second, whole, strict=True):
        assert torch.equal(continued, expected)
        for name, value in optimizer.state[expected].items():
            assert torch.equal(after.state[continued][name], value)
            assert after.state[continued][name].dtype == value.dtype


def test_loading_copies_and_leaves_the_source_alone() -> None:
    first, second = made_params(), made_params()
    before, after = host_adam(first, options()), host_adam(second, options())
    train(before, first, range(1))
    kept = {name: value.clone() for name, value in before.state[first[0]].items()}
    after.load_state_dict(before.state_dict())
    train(after, second, range(1, 2))
    for name, value in before.state[first[0]].items():
        assert torch.equal(value, kept[name])


def test_a_parameter_without_a_gradient_stays() -> None:
    params = made_params()
    optimizer = host_adam(params, options(overlap=True))
    train(optimizer, params[1:], range(2))
    start = made_params()
    assert torch.equal(params[0], start[0])
    assert not optimizer.state[params[0]]
    assert all(not torch.equal(p, s) for p, s in zip(params[1:], start[1:], strict=True))
