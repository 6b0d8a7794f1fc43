import math
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    make_config,
    make_rollouts,
    saving,
    steps_around_an_overflow_in_an_expert,
)
from tests.unit.backends.megatron_utils.layouts import Layout


def test_dense_parameters_and_experts_have_one_loss_scale_after_an_overflow_and_a_resume(
    megatron_ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    layout = " ".join(Layout(model="moe", ep=2, dp=2).argv)
    config = make_config(
        models["moe"],
        f"{layout} --initial-loss-scale 1024 --hysteresis 1",
        precision={"fp32": False, "fp16": True},
        # Weights stay: every step has the gradients of the first.
        optimizer={"lr": 0.0},
    )
    config = saving(config, tmp_path)
    rollouts = make_rollouts(config, 1, 2)
    job = steps_around_an_overflow_in_an_expert
    first = megatron_ranks.run_well(job, config, rollouts, num_ranks=2)
    resumed = megatron_ranks.run_well(job, config, rollouts, num_ranks=2)
    for found, later in zip(first, resumed, strict=True):
        assert found["scales"] == [1024, 1024, 512, 512, 512, 512]
        before, overflowed, after = found["norms"]
        assert not math.isfinite(overflowed)
        assert after == pytest.approx(before, rel=1e-2)
        assert later["scales"] == [512, 512]
        assert later["norms"] == [pytest.approx(before, rel=1e-2)]
