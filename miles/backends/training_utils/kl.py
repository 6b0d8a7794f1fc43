"""Log ratios that stay finite, and estimators of KL(policy || base) from samples of the policy."""

from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

EXPONENT_BOUND = 20.0
"""Log ratios are clamped to +-20 before exp: e^20 = 4.9e8 stays finite in products and sums."""
UNBOUNDED = 1e4
"""What an infinite log ratio counts as where it is not exponentiated."""


def log_ratio(log_probs: Tensor, base: Tensor) -> Tensor:
    """``log_probs - base``, finite: NaN becomes 0 and infinity +-1e4, both without gradient."""
    return torch.nan_to_num(log_probs - base, nan=0.0, posinf=UNBOUNDED, neginf=-UNBOUNDED)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp``, its argument clamped to +-20 (no gradient beyond)."""
    return log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def approx_kl(kind: KlKind, log_probs: Tensor, base: Tensor) -> Tensor:
    """KL estimate at each token, in the shape of ``log_probs``, with gradient.

    With r = log_probs - base: k1 = r; k2 = r^2 / 2; k3 = exp(-r) - 1 + r, where r counts as at
    least -20; low_var_kl = k3 clamped to +-10 (http://joschu.net/blog/kl-approx.html). Always
    finite: see ``log_ratio``.
    """
    r = log_ratio(log_probs, base)
    if kind == "k1":
        return r
    if kind == "k2":
        return r.square() / 2
    # Both terms share the clamp: with exp alone clamped, the gradient would change its sign.
    bounded = r.clamp(min=-EXPONENT_BOUND)
    k3 = torch.expm1(-bounded) + bounded
    return k3.clamp(-10.0, 10.0) if kind == "low_var_kl" else k3
