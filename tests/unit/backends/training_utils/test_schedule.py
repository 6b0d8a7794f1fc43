import math
from typing import Any

import pytest

from miles.backends.training_utils.schedule import learning_rate_at
from miles.config.errors import ConfigError
from miles.config.optimizer import OptimizerConfig


def rates(steps: list[int], total_steps: int, **flags: Any) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, **flags})
    return [learning_rate_at(step, config, total_steps) for step in steps]


def test_constant_stays_after_the_warm_up() -> None:
    flags = {"lr_warmup_iters": 4, "lr_warmup_init": 0.2}
    assert rates([0, 1, 4, 5, 99], 10, **flags) == pytest.approx([0.2, 0.4, 1.0, 1.0, 1.0])


def test_linear_falls_to_the_minimum_and_stays_there() -> None:
    flags = {"lr_decay_style": "linear", "min_lr": 0.2}
    assert rates([0, 5, 10, 11], 10, **flags) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_decay_starts_where_the_warm_up_ends() -> None:
    flags = {"lr_decay_style": "linear", "lr_warmup_iters": 2}
    assert rates([0, 1, 2, 6, 10], 10, **flags) == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_warm_up_can_be_a_fraction_of_the_decay() -> None:
    flags = {"lr_decay_style": "linear", "lr_warmup_fraction": 0.25, "lr_decay_iters": 8}
    assert rates([1, 2, 5, 8], 1000, **flags) == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_cosine() -> None:
    # Half of 1 + cos(pi / 4), (pi / 2), (3 pi / 4).
    root = math.sqrt(0.5)
    expected = [1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0]
    assert rates([0, 2, 4, 6, 8], 8, lr_decay_style="cosine") == pytest.approx(expected)


def test_inverse_square_root() -> None:
    flags = {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4, "min_lr": 0.3}
    # sqrt(4 / step), at least the minimum, which is also the rate after the end.
    assert rates([4, 16, 36, 64, 101], 100, **flags) == pytest.approx([1, 0.5, 1 / 3, 0.3, 0.3])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("linear", 0.75),
        ("cosine", (1 + math.sqrt(0.5)) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_wsd_is_stable_until_its_final_decay(form: str, expected: float) -> None:
    flags = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": form}
    assert rates([0, 6, 7, 10, 11], 10, **flags) == pytest.approx([1, 1, expected, 0, 0])


def test_wsd_without_its_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters"):
        rates([5], 10, lr_decay_style="WSD")


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_a_schedule_shorter_than_its_warm_up_is_defined(style: str) -> None:
    flags = {"lr_decay_style": style, "lr_warmup_iters": 5, "min_lr": 0.25}
    after = 1.0 if style == "constant" else 0.25
    assert rates([0, 5, 6], 3, **flags) == pytest.approx([0, 1.0, after])
