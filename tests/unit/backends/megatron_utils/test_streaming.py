"""Megatron with master weights and moments on disk, and with parameters made from masters."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from miles.config.root import MilesConfig
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    WHOLE,
    make_config,
    make_rollouts,
    saving,
    train_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import (
    train_with_naps,
    train_with_updates_between,
    wake_after_other_parameters,
)
from tests.unit.backends.streaming_jobs import NUM_ROLLOUTS, STEPS, streaming

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ON_HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer"
BF16 = {"fp32": False}
FP16 = {"fp32": False, "fp16": True}


def config_with(
    model: Path, offload: dict[str, Any], layout: str = "", precision: dict[str, Any] = BF16
) -> MilesConfig:
    return make_config(model, layout, optimizer=STEPS, offload=offload, precision=precision)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param("", BF16, id="dp2 bf16"),
        pytest.param(OVERLAP, BF16, id="dp2 bf16, overlap", marks=pytest.mark.full),
        pytest.param("", {}, id="dp2 fp32", marks=pytest.mark.full),
        pytest.param("--initial-loss-scale 1024", FP16, id="dp2 fp16", marks=pytest.mark.full),
        pytest.param(TP2, BF16, id="tp2 bf16", marks=pytest.mark.full),
    ],
)
def test_twenty_steps_equal_those_of_resident_state_bit_for_bit(
    megatron_ranks: Ranks,
    tiny_qwen3: Path,
    tmp_path: Path,
    layout: str,
    precision: dict[str, Any],
) -> None:
    """With sleeps to the same disk between them."""
    resident = config_with(tiny_qwen3, {}, layout, precision)
    streamed = config_with(tiny_qwen3, streaming(tmp_path), layout, precision)
    rollouts = make_rollouts(resident, NUM_ROLLOUTS, 1 if layout == TP2 else 2)
    expected = megatron_ranks.run_well(train_rollouts, resident, rollouts, num_ranks=2)
    found = megatron_ranks.run_well(train_with_naps, streamed, rollouts, num_ranks=2)
    for one, other in zip(found, expected, strict=True):
        assert len(one["steps"]) == 20
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
        assert one["held"] == {0}
        assert all(one["same"])


@pytest.mark.full
def test_experts_stream_like_everything_else(
    megatron_ranks: Ranks, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    """Their state is that of a second optimizer."""
    layout = "--expert-model-parallel-size 2"
    resident = config_with(tiny_qwen3_moe, {}, layout)
    streamed = config_with(tiny_qwen3_moe, streaming(tmp_path), layout)
    rollouts = make_rollouts(resident, 3, 2)
    expected = megatron_ranks.run_well(train_rollouts, resident, rollouts, num_ranks=2)
    found = megatron_ranks.run_well(train_rollouts, streamed, rollouts, num_ranks=2)
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.full),
        pytest.param(False, True, marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_with_streaming_on_or_off(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, first: bool, second: bool
) -> None:
    disk = streaming(tmp_path / "disk")
    plain = config_with(tiny_qwen3, {})
    rollouts = make_rollouts(plain, 4, 2)
    uninterrupted = megatron_ranks.run_well(train_rollouts, plain, rollouts, num_ranks=2)
    before, after = (
        saving(config_with(tiny_qwen3, disk if on else {}), tmp_path / "run")
        for on in (first, second)
    )
    megatron_ranks.run_well(train_rollouts, before, rollouts[:2], (1,), num_ranks=2)
    resumed = megatron_ranks.run_well(train_rollouts, after, rollouts, num_ranks=2)
    for whole, part in zip(uninterrupted, resumed, strict=True):
        assert part["first"] == 2
        assert part["steps"] == whole["steps"][-len(part["steps"]) :]
        assert part["weights"] == whole["weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param("", id="dp1"), pytest.param(TP2, id="tp2", marks=pytest.mark.full)]
)
def test_a_streamed_run_resumes_in_another_layout(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, layout: str
) -> None:
    disk = streaming(tmp_path / "disk")
    config = saving(config_with(tiny_qwen3, disk), tmp_path / "run")
    rollouts = make_rollouts(config, 3, 2)
    megatron_ranks.run_well(train_rollouts, config, rollouts[:2], (1,), num_ranks=2)
    alone = make_rollouts(config, 3, 1)
    answers = [
        megatron_ranks.run_well(
            train_rollouts,
            saving(config_with(tiny_qwen3, offload, layout), tmp_path / "run"),
            alone,
            num_ranks=2 if layout else 1,
        )[0]
        for offload in (disk, {})
    ]
    assert answers[0]["first"] == 2
    assert answers[0]["steps"] == answers[1]["steps"]
    assert answers[0]["weights"] == answers[1]["weights"]


@pytest.mark.full
def test_moments_of_another_dtype_are_refused_unless_asked_for(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    before = saving(config_with(tiny_qwen3, {}), tmp_path / "run")
    rounded = streaming(tmp_path / "disk", "bf16")
    after = saving(config_with(tiny_qwen3, rounded), tmp_path / "run")
    rollouts = make_rollouts(before, 2, 1)
    megatron_ranks.run_well(train_rollouts, before, rollouts[:1], (0,), num_ranks=1)
    (answer,) = megatron_ranks.run(train_rollouts, after, rollouts, num_ranks=1)
    assert "was saved with moments in float32, and this run keeps bfloat16" in str(answer)
    assert "--convert-optimizer-state" in str(answer)
    asked = dataclasses.replace(
        after, checkpoint=dataclasses.replace(after.checkpoint, convert_optimizer_state=True)
    )
    (answer,) = megatron_ranks.run_well(train_rollouts, asked, rollouts, num_ranks=1)
    assert answer["first"] == 1


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", id="dp2"),
        pytest.param(OVERLAP, id="dp2, overlap", marks=pytest.mark.full),
        pytest.param(WHOLE, id="dp2, optimizer whole", marks=pytest.mark.full),
        pytest.param(TP2, id="tp2", marks=pytest.mark.full),
        pytest.param(ON_HOST, id="dp2, masters in host memory", marks=pytest.mark.full),
    ],
)
def test_parameters_made_from_masters_are_those_that_were_dropped(
    megatron_ranks: Ranks, tiny_qwen3: Path, layout: str
) -> None:
    flags = {
        "offload_train": True,
        "rematerialize_param_from_master_weight": True,
        "check_rematerialize_param_from_master_weight": True,
    }
    plain = config_with(tiny_qwen3, {}, layout)
    rebuilding = config_with(tiny_qwen3, flags, layout)
    rollouts = make_rollouts(plain, 3, 1 if layout == TP2 else 2)
    expected = megatron_ranks.run_well(train_rollouts, plain, rollouts, num_ranks=2)
    found = megatron_ranks.run_well(train_with_updates_between, rebuilding, rollouts, num_ranks=2)
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
        # Of every second sleep an update had the weights before.
        assert one["kept"] == [one["parameters"], 0, one["parameters"]]


@pytest.mark.full
def test_parameters_that_are_not_what_they_were_are_named(
    megatron_ranks: Ranks, tiny_qwen3: Path
) -> None:
    flags = {
        "offload_train": True,
        "rematerialize_param_from_master_weight": True,
        "check_rematerialize_param_from_master_weight": True,
    }
    config = config_with(tiny_qwen3, flags)
    (answer,) = megatron_ranks.run_well(wake_after_other_parameters, config, num_ranks=1)
    name, _, text = answer.partition(": ")
    assert "--rematerialize-param-from-master-weight: 1 parameters are not what they were" in text
    assert text.endswith(name)
