"""Pairs of memory flags: a trainer that sleeps between rollouts trains as one that does not."""

from pathlib import Path
from typing import Any

import pytest

from miles.config.root import MilesConfig
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    make_config,
    make_rollouts,
    train_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import train_with_naps
from tests.unit.backends.megatron_utils.layouts import RECOMPUTE
from tests.unit.backends.streaming_jobs import STEPS, on_disk, streaming

BF16 = {"fp32": False}
FP16 = {"fp32": False, "fp16": True}
ON_HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 0.5"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
SCALE = "--initial-loss-scale 1024"
RESET = {"reset_optimizer_states": True}
REBUILD = {"offload_train": True, "rematerialize_param_from_master_weight": True}
STAGES = "--pipeline-model-parallel-size 2"
VIRTUAL = f"{STAGES} --num-virtual-stages-per-pipeline-rank 2"
SELECTIVE = (
    "--tensor-model-parallel-size 2 --sequence-parallel "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)


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
    groups = {"optimizer": STEPS, **groups}
    plain = make_config(tiny_qwen3, flags, **groups)
    sleeping = make_config(tiny_qwen3, flags, offload=asleep(tmp_path), **groups)
    assert_alike(megatron_ranks, plain, sleeping, dp_size=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "asleep"),
    [
        pytest.param(" ".join((STAGES, *RECOMPUTE)), streaming, id="stages streamed, recomputed"),
        pytest.param(VIRTUAL, lambda _: REBUILD, id="virtual stages rebuilt"),
        pytest.param(SELECTIVE, on_disk, id="tensor parallel on disk, partly recomputed"),
    ],
)
def test_sleeping_changes_nothing_where_ranks_divide_a_tied_model(
    megatron_ranks: Ranks, models: dict[str, Path], tmp_path: Path, flags: str, asleep: Any
) -> None:
    groups: dict[str, Any] = {"optimizer": STEPS, "precision": BF16}
    plain = make_config(models["tied"], flags, **groups)
    sleeping = make_config(models["tied"], flags, offload=asleep(tmp_path), **groups)
    assert_alike(megatron_ranks, plain, sleeping, dp_size=1)


def assert_alike(ranks: Ranks, plain: MilesConfig, sleeping: MilesConfig, *, dp_size: int) -> None:
    """On two ranks."""
    rollouts = make_rollouts(plain, 3, dp_size)
    expected = ranks.run_well(train_rollouts, plain, rollouts, num_ranks=2)
    found = ranks.run_well(train_with_naps, sleeping, rollouts, num_ranks=2)
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
        assert all(one["same"])
