"""``--optimizer-cpu-offload``. Without an accelerator both sides are host memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    load_and_report,
    make_config,
    make_rollouts,
    save_again,
    saving,
    train_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import (
    held_asleep,
    states_around_a_load,
    steps_around_a_bad_one,
    train_with_naps,
    weights_around_a_nap,
)
from tests.unit.backends.megatron_utils.layouts import OVERLAP, Layout

ON = "--optimizer-cpu-offload --use-precision-aware-optimizer"
HALF = f"{ON} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d"
UNPINNED = f"{ON} --no-pin-cpu-grads --no-pin-cpu-params --use-torch-optimizer-for-cpu-offload"
SCHEDULE = {
    "lr": 1e-3,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 3,
    "clip_grad": 0.05,
    "weight_decay": 0.1,
}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
BF16 = {"precision": {"fp32": False}}
FP16 = {"precision": {"fp32": False, "fp16": True}}
EXPERTS = Layout(model="moe", ep=2, dp=2)


@pytest.mark.parametrize(
    ("layout", "flags", "groups"),
    [
        pytest.param(Layout(dp=2, flags=OVERLAP), HALF, {}, id="dp2 fp32, half"),
        pytest.param(Layout(dp=2), UNPINNED, BF16, id="dp2 bf16, whole"),
        pytest.param(EXPERTS, HALF, BF16, id="experts bf16, half", marks=pytest.mark.full),
        pytest.param(
            Layout(dp=2, flags=("--initial-loss-scale", "1024")),
            HALF,
            FP16,
            id="dp2 fp16, half",
            marks=pytest.mark.full,
        ),
        pytest.param(
            Layout(dp=2),
            ON,
            {"algorithm": {"reset_optimizer_states": True}},
            id="moments reset",
        ),
    ],
)
def test_a_run_with_its_optimizer_in_host_memory_equals_one_without_bit_for_bit(
    megatron_ranks: Ranks,
    models: dict[str, Path],
    layout: Layout,
    flags: str,
    groups: dict[str, Any],
) -> None:
    """With a schedule, clipped gradients and weight decay."""
    model, argv = models[layout.model], " ".join(layout.argv)
    resident, offloaded = (
        make_config(model, f"{argv} {more}", optimizer=SCHEDULE, **groups) for more in ("", flags)
    )
    rollouts = make_rollouts(resident, 3, layout.dp)
    num_ranks = layout.num_ranks
    plain = megatron_ranks.run_well(train_rollouts, resident, rollouts, num_ranks=num_ranks)
    found = megatron_ranks.run_well(train_rollouts, offloaded, rollouts, num_ranks=num_ranks)
    for one, other in zip(found, plain, strict=True):
        assert one["steps"] == other["steps"]
        assert any(step.grad_norm > 0.05 for step in one["steps"])
        for key in ("weights", "counts", "rate", "rng"):
            assert one[key] == other[key], key


@pytest.mark.parametrize("flags", [ON, HALF], ids=["whole", "half"])
def test_sleep_leaves_alone_what_the_host_holds(
    megatron_ranks: Ranks, tiny_qwen3: Path, flags: str
) -> None:
    config = make_config(tiny_qwen3, flags, optimizer=SCHEDULE)
    rollouts = make_rollouts(config, 1, 1)
    (answer,) = megatron_ranks.run_well(held_asleep, config, rollouts, num_ranks=1)
    for elements, hosted, bytes_left in answer["states"]:
        assert bytes_left == (4 * elements if hosted else 0)
    total = sum(elements for elements, _, _ in answer["states"])
    hosted = sum(elements for elements, hosted, _ in answer["states"] if hosted)
    assert hosted == total if flags == ON else total / 2 <= hosted < 0.7 * total
    before, asleep, awake = answer["weights"]
    assert before == asleep == awake


@pytest.mark.full
def test_naps_change_nothing(megatron_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = make_config(tiny_qwen3, HALF, optimizer=SCHEDULE, algorithm=REFERENCE, **BF16)
    rollouts = make_rollouts(config, 2, 2)
    slept = megatron_ranks.run_well(train_with_naps, config, rollouts, num_ranks=2)
    awake = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=2)
    for one, other in zip(slept, awake, strict=True):
        assert one["held"] == {0}
        assert all(one["same"])
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]


def test_a_gradient_that_is_not_finite_changes_nothing(
    megatron_ranks: Ranks, tiny_qwen3: Path
) -> None:
    config = make_config(tiny_qwen3, HALF)
    rollouts = make_rollouts(config, 1, 2)
    for answer in megatron_ranks.run_well(steps_around_a_bad_one, config, rollouts, num_ranks=2):
        good, bad, next_good = answer["seen"]
        assert [x["stats"].skipped for x in answer["seen"]] == [False, True, False]
        assert bad["weights"] == good["weights"] != next_good["weights"]
        assert bad["state"] == good["state"] != next_good["state"]


@pytest.mark.parametrize(
    ("first", "second", "groups"),
    [
        pytest.param(HALF, HALF, BF16, id="bf16"),
        pytest.param(ON, HALF, {}, id="fp32, another fraction", marks=pytest.mark.full),
        pytest.param("", HALF, BF16, id="bf16, into host memory", marks=pytest.mark.full),
        pytest.param(HALF, "", {}, id="fp32, out of host memory", marks=pytest.mark.full),
        pytest.param(ON, "", BF16, id="bf16, out of host memory", marks=pytest.mark.full),
        pytest.param("", ON, {}, id="fp32, into host memory", marks=pytest.mark.full),
        pytest.param(
            f"{HALF} --exp-avg-dtype bf16",
            f"{ON} --exp-avg-dtype bf16",
            BF16,
            id="bf16, narrow moments",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    megatron_ranks: Ranks,
    tiny_qwen3: Path,
    tmp_path: Path,
    first: str,
    second: str,
    groups: dict[str, Any],
) -> None:
    made = {"algorithm": REFERENCE, "optimizer": SCHEDULE, **groups}
    before_config, after_config = (make_config(tiny_qwen3, f, **made) for f in (first, second))
    rollouts = make_rollouts(before_config, 4, 2)
    uninterrupted = megatron_ranks.run_well(train_rollouts, before_config, rollouts, num_ranks=2)
    saved, resumed = (saving(c, tmp_path, async_save=True) for c in (before_config, after_config))
    before = megatron_ranks.run_well(train_rollouts, saved, rollouts[:3], (2,), num_ranks=2)
    after = megatron_ranks.run_well(train_rollouts, resumed, rollouts, num_ranks=2)
    for whole, old, new in zip(uninterrupted, before, after, strict=True):
        assert (old["first"], new["first"]) == (0, 3)
        assert old["steps"] + new["steps"] == whole["steps"]
        for key in ("weights", "counts", "rate", "rng", "ref"):
            assert new[key] == whole[key], key


def test_a_checkpoint_is_read_into_the_state_that_the_host_holds_from_the_start(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Else Megatron makes tensors for all of it on the device."""
    config = make_config(tiny_qwen3, ON, **BF16)
    saved = saving(config, tmp_path)
    megatron_ranks.run_well(train_rollouts, saved, make_rollouts(saved, 1, 1), (0,), num_ranks=1)
    (answer,) = megatron_ranks.run_well(
        states_around_a_load, config, tmp_path / "iter_0000001", num_ranks=1
    )
    before, after = answer
    kinds = {"master_param", "exp_avg", "exp_avg_sq"}
    numbers = {name for name in before if name.count(".") == 1}
    assert before.keys() - numbers == {f"{n}.{kind}" for n in numbers for kind in kinds}
    assert before == after


def test_parameters_can_be_made_from_masters_before_a_first_step(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """At the start of a run, and of one whose checkpoint has no optimizer."""
    rebuilds = {"offload_train": True, "rematerialize_param_from_master_weight": True}
    config = make_config(tiny_qwen3, ON, offload=rebuilds, **BF16)
    (fresh,) = megatron_ranks.run_well(weights_around_a_nap, config, num_ranks=1)
    assert fresh[0] == fresh[1]
    config = saving(config, tmp_path, no_save_optim=True)
    rollouts = make_rollouts(config, 1, 1)
    (trained,) = megatron_ranks.run_well(train_rollouts, config, rollouts, (0,), num_ranks=1)
    (resumed,) = megatron_ranks.run_well(weights_around_a_nap, config, num_ranks=1)
    assert resumed[0] == resumed[1] == trained["weights"] != fresh[0]


@pytest.mark.full
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, HALF, optimizer=SCHEDULE, **BF16), tmp_path)
    trained = megatron_ranks.run_well(
        train_rollouts, config, make_rollouts(config, 2, 2), (1,), num_ranks=2
    )
    (alone,) = megatron_ranks.run_well(save_again, config, num_ranks=1)
    assert alone["first"] == 2
    back = megatron_ranks.run_well(load_and_report, config, num_ranks=2)
    for answer, old in zip(back, trained, strict=True):
        assert alone["weights"] == answer["weights"] == old["weights"]
        for key in ("optimizer", "counts", "rate"):
            assert answer[key] == old[key], key


def test_without_its_optimizer_a_checkpoint_continues_from_its_weights(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    found: list[Any] = []
    for name, flags in (("resident", ""), ("offloaded", HALF)):
        config = make_config(tiny_qwen3, flags, optimizer=SCHEDULE)
        rollouts = make_rollouts(config, 3, 1)
        config = saving(config, tmp_path / name, no_save_optim=True)
        megatron_ranks.run_well(train_rollouts, config, rollouts[:2], (1,), num_ranks=1)
        found += megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=1)
    resident, offloaded = found
    assert resident["first"] == offloaded["first"] == 2
    assert resident["steps"] == offloaded["steps"]
    assert resident["weights"] == offloaded["weights"]
