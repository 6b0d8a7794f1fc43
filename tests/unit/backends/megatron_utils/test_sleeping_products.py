"""Pairs of memory flags: a trainer that sleeps between rollouts trains as one that does not."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    make_config,
    make_rollouts,
    train_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import train_with_naps
from tests.unit.backends.streaming_jobs import STEPS, on_disk, streaming

BF16 = {"fp32": False}
FP16 = {"fp32": False, "fp16": True}
ON_HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 0.5"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
SCALE = "--initial-loss-scale 1024"
RESET = {"reset_optimizer_states": True}
REBUILD = {"offload_train": True, "rematerialize_param_from_master_weight": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "asleep", "groups"),
    [
        pytest.param(ON_HOST, on_disk, {"precision": BF16}, id="half on the host, half on disk"),
        pytest.param(NARROW, on_disk, {"precision": BF16}, id="narrow moments on disk"),
        pytest.param(SCALE, on_disk, {"precision": FP16}, id="fp16 on disk"),
        pytest.param(SCALE, lambda _: REBUILD, {"precision": FP16}, id="fp16 rebuilt"),
        pytest.param(
            "", streaming, {"precision": BF16, "algorithm": RESET}, id="streamed moments reset"
        ),
    ],
)
def test_sleeping_changes_nothing(
    megatron_ranks: Ranks,
    tiny_qwen3: Path,
    tmp_path: Path,
    flags: str,
    asleep: Any,
    groups: dict[str, Any],
) -> None:
    plain = make_config(tiny_qwen3, flags, optimizer=STEPS, **groups)
    sleeping = make_config(tiny_qwen3, flags, optimizer=STEPS, offload=asleep(tmp_path), **groups)
    rollouts = make_rollouts(plain, 3, 2)
    expected = megatron_ranks.run_well(train_rollouts, plain, rollouts, num_ranks=2)
    found = megatron_ranks.run_well(train_with_naps, sleeping, rollouts, num_ranks=2)
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
        assert all(one["same"])
