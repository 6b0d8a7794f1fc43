from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles.backends.megatron_utils.fused_adam import FusedAdam
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils import optimizer_jobs

SHAPES = ((7, 5), (11,))
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def made_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, attribute: str
) -> None:
    for step in steps:
        for param, gradient in zip(params, gradients_of(step), strict=True):
            setattr(param, attribute, gradient.to(param.device))
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_equal_those_of_torch(decoupled: bool) -> None:
    theirs, ours = made_params(), made_params()
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **SETTINGS)
    train(reference, theirs, range(20), "grad")
    train(FusedAdam(ours, adam_w_mode=decoupled, **SETTINGS), ours, range(20), "grad")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


def test_the_first_step_moves_each_weight_by_the_learning_rate() -> None:
    """Without decay: m / sqrt(v) of one gradient is its sign."""
    (param,) = [nn.Parameter(torch.tensor([1.0, -2.0]))]
    param.grad = torch.tensor([0.5, -4.0])
    optimizer = FusedAdam([param], lr=0.25, eps=0.0)
    optimizer.step()
    assert param.tolist() == pytest.approx([0.75, -1.75])
    assert optimizer.param_groups[0]["step"] == 1


def test_each_group_has_its_own_rate_and_only_groups_with_weights_count_steps() -> None:
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second]}, {"params": []}]
    optimizer = FusedAdam(groups, lr=0.25, eps=0.0)
    first.grad = torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx((0.5, 1.0))
    assert [group.get("step") for group in optimizer.param_groups] == [1, 1, None]
    assert not optimizer.state[second]


def test_the_weight_is_the_rounded_main_weight_which_trains_in_fp32() -> None:
    exact = [nn.Parameter(param.detach().float()) for param in made_params(torch.bfloat16)]
    train(torch.optim.AdamW(exact, **SETTINGS), exact, range(20), "grad")
    ours = made_params(torch.bfloat16)
    optimizer = FusedAdam(ours, master_weights=True, use_decoupled_grad=True, **SETTINGS)
    train(optimizer, ours, range(20), "decoupled_grad")
    for param, main in zip(ours, exact, strict=True):
        kept = optimizer.get_unscaled_state(param, "master_param")
        torch.testing.assert_close(kept, main.detach(), atol=1e-6, rtol=1e-6)
        assert torch.equal(param, kept.bfloat16())


def test_narrow_moments_are_the_rounded_ones_of_each_step() -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = FusedAdam(
        [param], betas=(0.5, 0.5), exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16
    )
    for gradient in (1.0, 1.01):
        param.grad = torch.tensor([gradient])
        optimizer.step()
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    # 0.25 + 0.505 and 0.25 + 0.51005 to 8 bits of mantissa.
    assert state["exp_avg"].item() == 0.75390625
    assert state["exp_avg_sq"].item() == 0.76171875
    assert optimizer.get_unscaled_state(param, "exp_avg").dtype == torch.float32


KINDS: list[dict[str, Any]] = [
    {},
    {"exp_avg_dtype": torch.bfloat16},
    {
        "exp_avg_sq_dtype": torch.bfloat16,
        "master_weights": True,
        "use_decoupled_grad": True,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(kind) or "plain")
def test_a_loaded_state_continues_as_if_never_saved(kind: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if kind.get("master_weights") else torch.float32
    attribute = "decoupled_grad" if kind.get("use_decoupled_grad") else "grad"
    whole = made_params(dtype)
    optimizer = FusedAdam(whole, **SETTINGS, **kind)
    train(optimizer, whole, range(8), attribute)
    first = made_params(dtype)
    before = FusedAdam(first, **SETTINGS, **kind)
    train(before, first, range(5), attribute)
    second = [nn.Parameter(param.detach().clone()) for param in first]
    after = FusedAdam(second, **SETTINGS, **kind)
    after.load_state_dict(before.state_dict())
    train(after, second, range(5, 8), attribute)
    for continued, expected in zip(second, whole, strict=True):
        assert torch.equal(continued, expected)
        for name, value in optimizer.state[expected].items():
            assert torch.equal(after.state[continued][name], value)
            assert after.state[continued][name].dtype == value.dtype


def test_a_state_set_from_fp32_is_stored_in_its_own_dtype() -> None:
    (param, _) = made_params()
    optimizer = FusedAdam([param], exp_avg_dtype=torch.bfloat16)
    value = torch.full(SHAPES[0], 1.0 + 2**-10)
    optimizer.set_scaled_state(param, "exp_avg", value)
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.ones(SHAPES[0]).bfloat16())
    optimizer.initialize_state(param)
    optimizer.set_scaled_state(param, "exp_avg_sq", value)
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exp_avg_dtype": torch.float16}, "--exp-avg-dtype torch.float16 needs Transformer"),
        ({"exp_avg_sq_dtype": torch.uint8}, "--exp-avg-sq-dtype torch.uint8 needs Transformer"),
        ({"master_weight_dtype": torch.float16}, "--main-params-dtype torch.float16"),
        ({"store_param_remainders": True}, "--store-param-remainders"),
        ({"capturable": True}, "--optimizer-cuda-graph"),
    ],
)
def test_what_only_transformer_engine_stores_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdam(made_params(), **settings)


def test_megatrons_optimizers_step_and_reload_it(megatron_ranks: Ranks) -> None:
    """bf16 weights with fp32 main weights: held by Megatron, or by FusedAdam."""
    plain = megatron_ranks.run_well(optimizer_jobs.train, False, num_ranks=2)
    aware = megatron_ranks.run_well(optimizer_jobs.train, True, num_ranks=2)
    for held_by_megatron, held_by_adam in zip(plain, aware, strict=True):
        assert held_by_megatron["moved"] > 0
        for name, expected in held_by_megatron["weights"].items():
            assert torch.equal(held_by_adam["weights"][name], expected), name
        assert held_by_adam["norms"] == held_by_megatron["norms"]
    for answer in (*plain, *aware):
        assert answer["reloaded"] == answer["continued"]
