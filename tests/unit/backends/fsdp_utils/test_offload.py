from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    make_config,
    make_rollouts,
    train_rollouts,
    train_with_naps,
)
from tests.unit.backends.streaming_jobs import STEPS, on_disk, streaming

FP16 = {"fp32": False, "fp16": True}
NARROW = {"keep_fp32_master": False}
SPARING = {"gradient_checkpointing": True, "accumulate_sharded_gradients": True}
RESET = {"reset_optimizer_states": True}


def test_sleep_frees_everything_and_changes_nothing(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = make_config(tiny_qwen3, algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1})
    rollouts = make_rollouts(config, 3)
    undisturbed = two_ranks.run_well(train_rollouts, config, rollouts)
    for napped, plain in zip(
        two_ranks.run_well(train_with_naps, config, rollouts), undisturbed, strict=True
    ):
        assert napped["held"] == {0}
        assert napped["refused"] == 3
        assert {"exp_avg", "exp_avg_sq", "step", "weight"} <= set(napped["kinds"])
        assert napped["steps"] == plain["steps"]
        assert napped["weights"] == plain["weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("asleep", "groups"),
    [
        pytest.param(streaming, {"precision": FP16}, id="fp16 streamed"),
        pytest.param(on_disk, {"precision": {"fp32": False}, "fsdp": NARROW}, id="bf16 on disk"),
        pytest.param(streaming, {"algorithm": RESET}, id="streamed moments reset"),
        pytest.param(
            streaming,
            {"precision": {"fp32": False}, "fsdp": SPARING},
            id="bf16 streamed, recomputed, sharded gradients",
        ),
        pytest.param(streaming, {"fsdp": {"dp_replicate_size": 2}}, id="replicas streamed"),
    ],
)
def test_sleeping_changes_nothing_whatever_else_is_given(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, asleep: Any, groups: dict[str, Any]
) -> None:
    plain = make_config(tiny_qwen3, optimizer=STEPS, **groups)
    sleeping = make_config(tiny_qwen3, optimizer=STEPS, offload=asleep(tmp_path), **groups)
    rollouts = make_rollouts(plain, 3)
    expected = two_ranks.run_well(train_rollouts, plain, rollouts)
    found = two_ranks.run_well(train_with_naps, sleeping, rollouts)
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
