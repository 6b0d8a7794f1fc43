"""``--fsdp-cpu-offload``. Without an accelerator the host is the device: the same code runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from miles.config.root import MilesConfig
from miles.core import device
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    held_asleep,
    load_and_report,
    make_config,
    make_rollouts,
    step_with_a_bad_gradient,
    train_rollouts,
    train_with_naps,
)
from tests.unit.backends.fsdp_utils.test_checkpoint import REFERENCE, SCHEDULE, saving

CLIPPED = SCHEDULE | {"clip_grad": 0.05}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def offloaded(config: MilesConfig) -> MilesConfig:
    return dataclasses.replace(config, fsdp=dataclasses.replace(config.fsdp, fsdp_cpu_offload=True))


@pytest.mark.parametrize(
    "groups",
    [
        {"algorithm": REFERENCE, "fsdp": {"gradient_checkpointing": True}},
        pytest.param({"precision": {"fp32": False}}, marks=pytest.mark.full),
        pytest.param({"precision": {"fp32": False, "fp16": True}}, marks=pytest.mark.full),
        pytest.param({"algorithm": {"reset_optimizer_states": True}}, marks=pytest.mark.full),
        pytest.param(
            {"data": {"max_tokens_per_gpu": 20}, "fsdp": {"accumulate_sharded_gradients": True}},
            marks=pytest.mark.full,
        ),
    ],
    ids=[
        "fp32, recomputed, moving reference",
        "bf16",
        "fp16",
        "moments reset",
        "sharded gradients",
    ],
)
def test_a_run_with_its_shards_in_host_memory_equals_one_without_bit_for_bit(
    two_ranks: Ranks, tiny_qwen3: Path, groups: dict[str, Any]
) -> None:
    config = make_config(tiny_qwen3, optimizer=CLIPPED, **groups)
    rollouts = make_rollouts(config, 3)
    plain = two_ranks.run_well(train_rollouts, config, rollouts)
    assert two_ranks.run_well(train_rollouts, offloaded(config), rollouts) == plain


@pytest.mark.full
def test_ranks_that_hold_nothing_of_a_parameter_train_alike(
    two_ranks: Ranks, narrow_qwen3: Path
) -> None:
    config = make_config(narrow_qwen3)
    rollouts = make_rollouts(config, 2)
    plain = two_ranks.run_well(train_rollouts, config, rollouts)
    assert two_ranks.run_well(train_rollouts, offloaded(config), rollouts) == plain


def test_a_bad_gradient_skips_the_step(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = offloaded(make_config(tiny_qwen3, optimizer=SCHEDULE))
    rollouts = make_rollouts(config, 1)
    for answer in two_ranks.run_well(step_with_a_bad_gradient, config, rollouts, float("nan")):
        assert [step.skipped for step in answer["steps"]] == [False, True, False]
        before, skipped, after = answer["states"]
        assert skipped == before
        assert after[0] != before[0]


def test_sleep_leaves_alone_what_the_host_holds(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = offloaded(make_config(tiny_qwen3, algorithm=KL))
    for answer in two_ranks.run_well(held_asleep, config, make_rollouts(config, 1)):
        policy = CPUOffloadPolicy(pin_memory=device.has_accelerator())
        assert answer["policies"]
        assert all(found == policy for found in answer["policies"])
        left = answer["left"]
        for kind in ("parameters", "reference", "optimizer"):
            assert min(left[kind]) > 0, kind
        for kind in ("buffers", "reference's buffers"):
            assert left[kind], kind
            assert max(left[kind]) == 0, kind
        before, asleep, awake = answer["weights"]
        assert before == asleep == awake


@pytest.mark.full
def test_naps_change_nothing(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = offloaded(make_config(tiny_qwen3, algorithm=KL))
    rollouts = make_rollouts(config, 2)
    undisturbed = two_ranks.run_well(train_rollouts, config, rollouts)
    for napped, plain in zip(
        two_ranks.run_well(train_with_naps, config, rollouts), undisturbed, strict=True
    ):
        assert napped["refused"] == 2
        assert napped["steps"] == plain["steps"]
        assert napped["weights"] == plain["weights"]


@pytest.mark.full
@pytest.mark.parametrize("first", [False, True], ids=["into host memory", "out of host memory"])
def test_a_checkpoint_goes_on_with_its_shards_in_another_place(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, first: bool
) -> None:
    config = make_config(tiny_qwen3, algorithm=REFERENCE, optimizer=CLIPPED)
    rollouts = make_rollouts(config, 4)
    whole = two_ranks.run_well(train_rollouts, config, rollouts)
    resident = saving(config, tmp_path, async_save=True)
    lives = [resident, offloaded(resident)]
    before = two_ranks.run_well(train_rollouts, lives[first], rollouts[:3], 0, (2,))
    found = [two_ranks.run_well(load_and_report, life) for life in lives]
    assert found[0] == found[1]
    after = two_ranks.run_well(train_rollouts, lives[not first], rollouts)
    for undisturbed, old, new in zip(whole, before, after, strict=True):
        assert new["first"] == 3
        assert old["steps"] + new["steps"] == undisturbed["steps"]
        assert new["weights"] == undisturbed["weights"]
