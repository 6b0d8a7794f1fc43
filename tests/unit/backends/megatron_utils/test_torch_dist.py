import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles.backends.training_utils import checkpoints
from miles.config.root import MilesConfig
from miles.core.hf import load_config, stated_model
from scripts.made_models import make_qwen3_moe
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    WHOLE,
    advance_random_state,
    attempt_saves,
    convert,
    load_and_report,
    make_config,
    make_rollouts,
    save_again,
    save_in_background,
    saving,
    start,
    tensors_in,
    train_rollouts,
    with_megatrons_own_loader,
)
from tests.unit.backends.megatron_utils.layouts import Layout

SCHEDULE = {"lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 3}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
TP2_PP2 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 4000"
"""Many gradient buckets, some with padding behind them."""
BUSBW = "--ddp-pad-buckets-for-high-nccl-busbw"
BF16 = {"precision": {"fp32": False}}
FP16 = {"precision": {"fp32": False, "fp16": True}}


@pytest.mark.parametrize(
    ("layout", "groups", "num_ranks", "dp_size"),
    [
        pytest.param("", {}, 2, 2, id="dp2 fp32"),
        pytest.param("", BF16, 2, 2, id="dp2 bf16"),
        pytest.param(WHOLE, BF16, 1, 1, id="one bf16, optimizer whole"),
        pytest.param(BUCKETS, BF16, 1, 1, id="one bf16, padded buckets"),
        pytest.param(BUCKETS, {}, 3, 3, id="dp3 fp32, padded buckets", marks=pytest.mark.full),
        pytest.param(PP2, BF16, 6, 3, id="pp2 dp3, tied embeddings", marks=pytest.mark.full),
        pytest.param(
            f"{BUCKETS} {BUSBW}", BF16, 2, 2, id="dp2, wide padding", marks=pytest.mark.full
        ),
        pytest.param(
            "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
            BF16,
            4,
            4,
            id="dp4, two optimizers of two",
            marks=pytest.mark.full,
        ),
        pytest.param(WHOLE, {}, 2, 2, id="dp2 fp32, optimizer whole", marks=pytest.mark.full),
        pytest.param(TP2_PP2, BF16, 4, 1, id="tp2 pp2", marks=pytest.mark.full),
        pytest.param(
            "--initial-loss-scale 1024", FP16, 2, 2, id="dp2 fp16", marks=pytest.mark.full
        ),
        pytest.param(
            "--use-precision-aware-optimizer --exp-avg-dtype bf16",
            BF16,
            2,
            2,
            id="dp2 bf16, narrow moments",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(  # noqa: PLR0913
    megatron_ranks: Ranks,
    tiny_qwen3: Path,
    tmp_path: Path,
    layout: str,
    groups: dict[str, Any],
    num_ranks: int,
    dp_size: int,
) -> None:
    config = make_config(tiny_qwen3, layout, algorithm=REFERENCE, optimizer=SCHEDULE, **groups)
    rollouts = make_rollouts(config, 4, dp_size)
    uninterrupted = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=num_ranks)
    config = saving(config, tmp_path / "run")
    # Saved after three rollouts: between two updates of the reference.
    first = megatron_ranks.run_well(
        train_rollouts, config, rollouts[:3], (0, 2), num_ranks=num_ranks
    )
    second = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=num_ranks)
    for whole, before, after in zip(uninterrupted, first, second, strict=True):
        assert (before["first"], after["first"]) == (0, 3)
        assert before["steps"] + after["steps"] == whole["steps"]
        assert any(not step.skipped and step.grad_norm > 0 for step in after["steps"])
        for key in ("weights", "optimizer", "counts", "rate", "rng", "ref"):
            assert after[key] == whole[key], key


@pytest.mark.full
def test_a_stage_without_experts_resumes_beside_one_with_experts(
    megatron_ranks: Ranks, tmp_path: Path
) -> None:
    model = make_qwen3_moe(tmp_path / "model", num_layers=4, dense_layers=(0, 1))
    layout = " ".join(Layout(model="moe", pp=2, ep=2, dp=2).argv)
    config = make_config(model, layout, **BF16)
    rollouts = make_rollouts(config, 2, 2)
    uninterrupted = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=4)
    config = saving(config, tmp_path / "run")
    megatron_ranks.run_well(train_rollouts, config, rollouts[:1], (0,), num_ranks=4)
    resumed = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=4)
    for whole, after in zip(uninterrupted, resumed, strict=True):
        assert after["first"] == 1
        for key in ("weights", "optimizer", "counts", "rng"):
            assert after[key] == whole[key], key


def test_the_layout_of_a_checkpoint(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path)
    rollouts = make_rollouts(config, 1, 2)
    megatron_ranks.run_well(train_rollouts, config, rollouts, (0,), num_ranks=2)
    step = tmp_path / "iter_0000001"
    files = {path.name for path in step.iterdir()}
    assert {".metadata", "__0_0.distcp", "metadata.json"} < files
    assert {"rng_00000.safetensors", "rng_00001.safetensors"} < files
    assert (tmp_path / checkpoints.TRACKER).read_text() == "1"
    metadata = json.loads((step / "metadata.json").read_text())
    assert metadata["sharded_backend"] == "torch_dist", "Megatron reads this file too"
    assert metadata["backend"] == "megatron"
    assert metadata["rollout_id"] == 0
    assert metadata["model"] == stated_model(str(tiny_qwen3))
    assert metadata["world_size"] == 2
    assert metadata["parts"] == ["model", "optimizer"]
    assert metadata["config"]["optimizer"]["lr"] == config.optimizer.lr
    assert metadata["dtypes"]["model.norm.weight"] == "float32"


MOVES = [
    (Layout(tp=2, pp=2, sequence_parallel=True), Layout(), True),
    (Layout(dp=2), Layout(tp=2, pp=2, sequence_parallel=True), True),
    (
        Layout(model="moe", ep=2, dp=2),
        Layout(model="moe", tp=2, etp=2, sequence_parallel=True),
        True,
    ),
    (
        Layout(dp=3, flags=tuple(BUCKETS.split()), note="padded buckets"),
        Layout(dp=2, flags=tuple(BUCKETS.split()), note="padded buckets"),
        True,
    ),
    (Layout(tp=2), Layout(dp=4), False),
    (Layout(model="tied", pp=2, dp=3), Layout(model="tied", tp=2), False),
    (Layout(model="tied", pp=2, dp=2), Layout(model="tied", pp=2, vpp=2), False),
    (Layout(pp=2, vpp=2), Layout(cp=2), False),
    (Layout(model="moe", pp=2), Layout(model="moe", ep=4, dp=4), False),
    (
        Layout(model="moe", ep=2, dp=2, flags=tuple(BUCKETS.split()), note="padded buckets"),
        Layout(model="moe", pp=2, ep=2, dp=2),
        False,
    ),
    (
        Layout(model="moe", tp=2, pp=2, ep=4, dp=2, sequence_parallel=True),
        Layout(model="moe", pp=2, vpp=2, ep=2, dp=2),
        False,
    ),
]
"""Where a run was saved, where it goes on, whether `make test` tries it."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, id=f"{a} to {b}", marks=() if quick else pytest.mark.full)
        for a, b, quick in MOVES
    ],
)
def test_another_layout_of_ranks_goes_on_with_weights_and_optimizer(
    megatron_ranks: Ranks,
    models: dict[str, Path],
    tmp_path: Path,
    before: Layout,
    after: Layout,
) -> None:
    def config_of(layout: Layout, folder: Path) -> MilesConfig:
        groups = {"optimizer": SCHEDULE, **BF16, **layout.groups}
        return saving(make_config(models[layout.model], " ".join(layout.argv), **groups), folder)

    config = config_of(before, tmp_path / "a")
    rollouts = make_rollouts(config, 2, before.dp)
    saved = megatron_ranks.run_well(
        train_rollouts, config, rollouts, (1,), num_ranks=before.num_ranks
    )[0]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = config_of(after, tmp_path / "b")
    for found in megatron_ranks.run_well(save_again, config, num_ranks=after.num_ranks):
        assert found["first"] == 2
        assert found["weights"] == saved["weights"]
        assert {count for count in found["counts"] if count} == {4}, "two steps a rollout"
        assert found["rate"] == saved["rate"]
    # Written again by the other layout, every tensor of weights and optimizer is the same.
    vocab_size = load_config(str(models[after.model])).vocab_size
    old, new = (read(megatron_ranks, tmp_path / name, vocab_size) for name in ("a", "b"))
    assert old == new


def test_a_bf16_run_goes_on_in_fp32_with_its_exact_weights_on_every_rank(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, optimizer=SCHEDULE, **BF16), tmp_path)
    rollouts = make_rollouts(config, 1, 2)
    megatron_ranks.run_well(train_rollouts, config, rollouts, (0,), num_ranks=2)
    wide = saving(make_config(tiny_qwen3, optimizer=SCHEDULE), tmp_path)
    # Alone, a rank reads all of the main parameters.
    (whole,) = megatron_ranks.run_well(load_and_report, wide, num_ranks=1)
    for found in megatron_ranks.run_well(load_and_report, wide, num_ranks=2):
        assert found["weights"] == whole["weights"]


def read(ranks: Ranks, folder: Path, vocab_size: int) -> dict[str, Any]:
    step = str(folder / "iter_0000002")
    (tensors,) = ranks.run_well(tensors_in, step, vocab_size, num_ranks=1)
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in tensors)
    return tensors


def test_ranks_go_on_with_their_own_random_state(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, TP2), tmp_path)
    before = megatron_ranks.run_well(advance_random_state, config, num_ranks=2)
    after = megatron_ranks.run_well(advance_random_state, config, num_ranks=2)
    assert after == before
    assert before[0]["plain"] != before[1]["plain"]
    assert before[0]["tracked"] != before[1]["tracked"]


def test_a_save_in_the_background_holds_the_weights_of_its_rollout(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path, async_save=True)
    rollouts = make_rollouts(config, 3, 2)
    answers = megatron_ranks.run_well(save_in_background, config, rollouts, num_ranks=2)
    assert [answer["tracker"] for answer in answers] == [3, 3]
    for iteration in (1, 3):
        (tmp_path / checkpoints.TRACKER).write_text(str(iteration))
        found, _ = megatron_ranks.run_well(load_and_report, config, num_ranks=2)
        assert found["weights"] == answers[0]["weights"][iteration - 1]


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_half_way_fails_on_every_rank_and_leaves_the_older_one(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, async_save: bool
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path, async_save=async_save)
    rollouts = make_rollouts(config, 3 if async_save else 2, 2)
    # Saves of rollouts 0, 1 (fails) and, in the background, 2 (where the failure comes out).
    for answer in megatron_ranks.run_well(attempt_saves, config, rollouts, 30_000, num_ranks=2):
        (error,) = answer["errors"]
        assert error.startswith("2: " if async_save else "1: ")
        assert "checkpoint 2" in error
        assert "File too large" in error
        assert f"MiB are free in {tmp_path}" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", checkpoints.TRACKER]
    assert megatron_ranks.run_well(start, config, num_ranks=2) == [1, 1]


def test_megatrons_own_loader_reads_a_checkpoint(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, optimizer=SCHEDULE), tmp_path)
    rollouts = make_rollouts(config, 1, 2)
    saved = megatron_ranks.run_well(train_rollouts, config, rollouts, (0,), num_ranks=2)
    # Nobody gathers the optimizer, and weights that both hold are written by either.
    sizes = [path.stat().st_size for path in tmp_path.glob("iter_0000001/*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.8 * max(sizes)
    found = megatron_ranks.run_well(with_megatrons_own_loader, config, num_ranks=2)
    for ours, theirs in zip(saved, found, strict=True):
        assert theirs["iteration"] == 1
        for key in ("weights", "optimizer", "counts", "rate"):
            assert theirs[key] == ours[key], key


def test_without_its_optimizer_a_checkpoint_goes_on_with_fresh_moments(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_qwen3, optimizer=SCHEDULE, **BF16)
    config = saving(config, tmp_path, no_save_optim=True)
    rollouts = make_rollouts(config, 2, 2)
    trained = megatron_ranks.run_well(train_rollouts, config, rollouts, (1,), num_ranks=2)
    found = megatron_ranks.run_well(load_and_report, config, num_ranks=2)
    for before, after in zip(trained, found, strict=True):
        assert after["first"] == 2
        assert after["weights"] == before["weights"]
        assert not any("exp_avg" in n and any(b) for n, (_, b) in after["optimizer"].items())
        assert after["rate"] == before["rate"]
    # The main parameters are those that were loaded: another rollout goes on from them.
    more = megatron_ranks.run_well(train_rollouts, config, make_rollouts(config, 3, 2), num_ranks=2)
    assert more[0]["first"] == 2
    assert more[0]["weights"] != trained[0]["weights"]
    assert distance(more[0]["weights"], trained[0]["weights"]) < 0.02


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    from tests.unit.backends.fsdp_utils.jobs import from_bytes

    return max(
        float((from_bytes(one[name]).float() - from_bytes(other[name]).float()).abs().max())
        for name in one
    )


def test_a_resumed_run_takes_the_learning_rate_of_its_own_flags(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path)
    megatron_ranks.run_well(train_rollouts, config, make_rollouts(config, 1, 2), (0,), num_ranks=2)
    slower = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=1e-4))
    found = megatron_ranks.run_well(
        train_rollouts, slower, make_rollouts(config, 2, 2), num_ranks=2
    )
    assert found[0]["first"] == 1
    assert {step.learning_rate for step in found[0]["steps"]} == {1e-4}
    assert set(found[0]["counts"]) == {4}


def test_a_reference_that_moved_stays_where_it_is_when_it_moves_no_more(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    moving = saving(make_config(tiny_qwen3, PP2, algorithm=REFERENCE), tmp_path)
    moved = megatron_ranks.run_well(
        train_rollouts, moving, make_rollouts(moving, 3, 1), (2,), num_ranks=2
    )
    still = saving(
        make_config(tiny_qwen3, PP2, algorithm=REFERENCE | {"ref_update_interval": None}), tmp_path
    )
    later = megatron_ranks.run_well(
        train_rollouts, still, make_rollouts(still, 4, 1), (3,), num_ranks=2
    )
    found = megatron_ranks.run_well(load_and_report, still, num_ranks=2)
    for once, then, now in zip(moved, later, found, strict=True):
        assert now["first"] == 4
        assert once["ref"] == then["ref"] == now["ref"]
        assert once["ref"]


def test_converted_weights_start_at_rollout_zero_with_a_fresh_optimizer(
    megatron_ranks: Ranks, tiny_qwen3: Path, tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    source = make_config(tiny_qwen3, TP2)
    converted = megatron_ranks.run_well(convert, source, str(tmp_path / "w"), num_ranks=2)[0]
    assert (tmp_path / "w" / checkpoints.TRACKER).read_text() == "release"
    assert checkpoints.is_weights_only(tmp_path / "w" / "release")
    metadata = checkpoints.read_metadata(tmp_path / "w" / "release")
    assert metadata["model"] == stated_model(str(tiny_qwen3))
    config = make_config(tiny_qwen3)
    # Other weights would be read from here if the converted ones were not taken.
    loading = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, load=str(tmp_path / "w"))
    )
    fresh = megatron_ranks.run_well(load_and_report, config, num_ranks=2)
    found = megatron_ranks.run_well(load_and_report, loading, num_ranks=2)
    for answer, plain in zip(found, fresh, strict=True):
        assert answer["first"] == 0
        assert answer["weights"] == converted == plain["weights"]
        assert answer["optimizer"] == plain["optimizer"]
        assert answer["counts"] == plain["counts"]
