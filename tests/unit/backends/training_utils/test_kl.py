import math

import pytest
import torch

from miles.backends.training_utils.kl import approx_kl

KINDS = ["k1", "k2", "k3", "low_var_kl"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147), ("low_var_kl", 0.193147)],
)
def test_estimators_at_a_policy_twice_as_likely_as_the_base(kind: str, expected: float) -> None:
    # r = ln(0.5 / 0.25) = ln 2; k2 = (ln 2)^2 / 2; k3 = 1/2 - 1 + ln 2.
    policy, base = torch.tensor([0.5, 0.25]).log()
    assert approx_kl(kind, policy, base).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_log_probs_have_zero_kl(kind: str) -> None:
    log_probs = torch.tensor([-3.7, -0.01, -40.0])
    assert approx_kl(kind, log_probs, log_probs.clone()).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_k3_keeps_its_precision_near_zero(kind: str) -> None:
    # exp(-r) - 1 + r = r^2 / 2 - r^3 / 6 + ...; r = 2^-10 is exact in float32.
    r = 2.0**-10
    value = approx_kl(kind, torch.tensor(r), torch.tensor(0.0)).item()
    assert value == pytest.approx(r**2 / 2 - r**3 / 6, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [1e4, -1e4, math.inf, -math.inf, math.nan])
def test_wild_log_ratios_give_finite_values_and_gradients(kind: str, value: float) -> None:
    log_probs = torch.tensor([value, -1.0], requires_grad=True)
    kl = approx_kl(kind, log_probs, torch.tensor([0.0, -1.0]))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert kl[1] == 0


def test_low_var_kl_is_bounded_by_ten() -> None:
    far = approx_kl("low_var_kl", torch.tensor([-15.0, 15.0]), torch.tensor([0.0, 0.0]))
    assert far.tolist() == [10.0, 10.0]


def test_k3_never_pushes_the_policy_further_below_the_base() -> None:
    log_probs = torch.tensor([-5.0, -30.0], requires_grad=True)
    approx_kl("k3", log_probs, torch.zeros(2)).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].item() == pytest.approx(1 - math.exp(5), rel=1e-5)
    assert log_probs.grad[1].item() == 0
