"""FSDP with Adam's moments on disk."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from miles.config.root import MilesConfig
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    make_config,
    make_rollouts,
    train_rollouts,
    train_with_naps,
)
from tests.unit.backends.streaming_jobs import NUM_ROLLOUTS, STEPS, streaming


def config_with(model: Path, offload: dict[str, Any], folder: Path | None = None) -> MilesConfig:
    checkpoint = {} if folder is None else {"save": str(folder), "load": str(folder)}
    return make_config(model, optimizer=STEPS, offload=offload, checkpoint=checkpoint)


def test_twenty_steps_equal_those_of_resident_state_bit_for_bit(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """With sleeps to the same disk between them."""
    resident = config_with(tiny_qwen3, {})
    streamed = config_with(tiny_qwen3, streaming(tmp_path))
    rollouts = make_rollouts(resident, NUM_ROLLOUTS)
    expected = two_ranks.run_well(train_rollouts, resident, rollouts)
    for found, own in zip(
        two_ranks.run_well(train_with_naps, streamed, rollouts), expected, strict=True
    ):
        assert len(found["steps"]) == 20
        assert found["steps"] == own["steps"]
        assert found["weights"] == own["weights"]
        assert found["held"] == {0}
        assert "exp_avg" not in found["kinds"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (True, False),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, True, marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_with_streaming_on_or_off(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, first: bool, second: bool
) -> None:
    disk = streaming(tmp_path / "disk")
    plain = config_with(tiny_qwen3, {})
    rollouts = make_rollouts(plain, 4)
    uninterrupted = two_ranks.run_well(train_rollouts, plain, rollouts)
    before, after = (
        config_with(tiny_qwen3, disk if on else {}, tmp_path / "run") for on in (first, second)
    )
    two_ranks.run_well(train_rollouts, before, rollouts[:2], 0, (1,))
    resumed = two_ranks.run_well(train_rollouts, after, rollouts)
    for whole, part in zip(uninterrupted, resumed, strict=True):
        assert part["first"] == 2
        assert part["steps"] == whole["steps"][-len(part["steps"]) :]
        assert part["weights"] == whole["weights"]


@pytest.mark.full
def test_a_streamed_run_resumes_on_another_number_of_ranks(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = config_with(tiny_qwen3, streaming(tmp_path / "disk"), tmp_path / "run")
    rollouts = make_rollouts(config, 3)
    two_ranks.run_well(train_rollouts, config, rollouts[:2], 0, (1,))
    alone = make_rollouts(config, 3, dp_size=1)
    resident = dataclasses.replace(config, offload=MilesConfig().offload)
    answers = [
        two_ranks.run_well(train_rollouts, own, alone, num_ranks=1)[0] for own in (config, resident)
    ]
    assert answers[0]["first"] == 2
    assert answers[0] == answers[1]


@pytest.mark.full
def test_moments_of_another_dtype_are_refused_unless_asked_for(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    rounded = streaming(tmp_path / "disk", "bf16")
    before = config_with(tiny_qwen3, {}, tmp_path / "run")
    after = config_with(tiny_qwen3, rounded, tmp_path / "run")
    rollouts = make_rollouts(before, 2)
    two_ranks.run_well(train_rollouts, before, rollouts[:1], 0, (0,))
    for answer in two_ranks.run(train_rollouts, after, rollouts):
        assert "was saved with moments in float32, and this run keeps bfloat16" in str(answer)
        assert "--convert-optimizer-state" in str(answer)
    asked = dataclasses.replace(
        after, checkpoint=dataclasses.replace(after.checkpoint, convert_optimizer_state=True)
    )
    for answer in two_ranks.run_well(train_rollouts, asked, rollouts):
        assert answer["first"] == 1
