"""Every layout of ranks trains like one process with transformers' model and torch's AdamW."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import from_bytes, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    SUPERVISED,
    plain_training,
)
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_rollouts
from tests.unit.backends.megatron_utils.layouts import LAYOUTS, Layout, params, table
from tests.unit.backends.megatron_utils.made_models import per_expert

ADAM_EPS = 1e-4
"""With the default one, gradients that are nothing but rounding would move weights."""
DOCUMENT = Path(__file__).parents[4] / "docs/training-backend.md"


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, Any]:
    """Steps and weights of one process without Megatron, by model, computed when first needed."""
    return {}


def plain_run(plain: dict[str, Any], models: dict[str, Path], name: str) -> Any:
    if name not in plain:
        steps, weights = plain_training(models[name], adam_eps=ADAM_EPS)
        plain[name] = steps, per_expert(weights)
    return plain[name]


@pytest.mark.parametrize("layout", params(LAYOUTS))
def test_a_layout_trains_like_one_plain_process(
    megatron_ranks: Ranks,
    layout: Layout,
    models: dict[str, Path],
    plain: dict[str, Any],
) -> None:
    config = make_config(
        models[layout.model],
        *layout.argv,
        algorithm=SUPERVISED,
        optimizer={**OPTIMIZER, "adam_eps": ADAM_EPS},
        **layout.groups,
    )
    rollouts = make_rollouts(config, NUM_ROLLOUTS, dp_size=layout.dp)
    results = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=layout.num_ranks)
    steps, weights = plain_run(plain, models, layout.model)
    for result in results:
        assert result["steps"] == results[0]["steps"]
        assert result["weights"] == results[0]["weights"]
    (first, *_) = results
    assert len(first["steps"]) == len(steps) == 4
    for step, (loss, norm, rate) in zip(first["steps"], steps, strict=True):
        assert step.loss == pytest.approx(loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(norm, rel=1e-5)
        assert step.learning_rate == pytest.approx(rate, abs=1e-12)
        assert not step.skipped
    assert set(first["weights"]) == set(weights)
    for name, value in first["weights"].items():
        torch.testing.assert_close(
            from_bytes(value), weights[name].reshape(-1), atol=2e-6, rtol=0, msg=name
        )


def test_the_documented_layouts_are_those_that_are_tested() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")
