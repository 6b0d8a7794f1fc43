import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.backends.training_utils import checkpoints
from miles.backends.training_utils.checkpoint_writer import derived_seed
from miles.config.errors import ConfigError
from miles.config.root import MilesConfig
from miles.core.hf import stated_model
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    advance_random_state,
    attempt_saves,
    load_and_report,
    make_config,
    make_rollouts,
    save_in_background,
    start,
    train_rollouts,
)

SCHEDULE = {"lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 3}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}


def saving(config: MilesConfig, folder: Path, **fields: Any) -> MilesConfig:
    checkpoint = dataclasses.replace(
        config.checkpoint, save=str(folder), load=str(folder), **fields
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("model", "async_save"), [("tiny_qwen3", False), ("tiny_qwen3", True), ("narrow_qwen3", True)]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    two_ranks: Ranks,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: str,
    async_save: bool,
) -> None:
    config = make_config(request.getfixturevalue(model), algorithm=REFERENCE, optimizer=SCHEDULE)
    rollouts = make_rollouts(config, 4)
    uninterrupted = two_ranks.run_well(train_rollouts, config, rollouts)
    config = saving(config, tmp_path / "run", async_save=async_save)
    # Saved after three rollouts: between two updates of the reference.
    first = two_ranks.run_well(train_rollouts, config, rollouts[:3], 0, (0, 2))
    second = two_ranks.run_well(train_rollouts, config, rollouts)
    for whole, before, after in zip(uninterrupted, first, second, strict=True):
        assert (before["first"], after["first"]) == (0, 3)
        assert before["steps"] + after["steps"] == whole["steps"]
        assert before["metrics"] + after["metrics"] == whole["metrics"]
        assert after["weights"] == whole["weights"]


def test_the_layout_of_a_checkpoint(two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path)
    two_ranks.run_well(train_rollouts, config, make_rollouts(config, 1), 0, (0,))
    step = tmp_path / "iter_0000001"
    assert sorted(p.name for p in step.iterdir()) == [
        "lr_scheduler",
        "metadata.json",
        "model",
        "optimizer",
        "rng_00000.safetensors",
        "rng_00001.safetensors",
    ]
    assert (tmp_path / checkpoints.TRACKER).read_text() == "1"
    for part in ("model", "optimizer", "lr_scheduler"):
        assert (step / part / ".metadata").is_file()
    metadata = json.loads((step / "metadata.json").read_text())
    assert metadata["rollout_id"] == 0
    assert metadata["model"] == stated_model(str(tiny_qwen3))
    assert metadata["world_size"] == 2
    assert metadata["config"]["optimizer"]["lr"] == config.optimizer.lr
    assert metadata["dtypes"]["model.norm.weight"] == "float32"


def test_a_save_in_the_background_holds_the_weights_of_its_rollout(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path, async_save=True)
    answers = two_ranks.run_well(save_in_background, config, make_rollouts(config, 3))
    assert [answer["trackers"] for answer in answers] == [[3], [3]]
    for iteration in (1, 2, 3):
        (tmp_path / checkpoints.TRACKER).write_text(str(iteration))
        found, _ = two_ranks.run_well(load_and_report, config)
        assert found["weights"] == answers[0]["weights"][iteration - 1]


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_half_way_fails_on_every_rank_and_leaves_the_older_one(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, async_save: bool
) -> None:
    config = saving(make_config(tiny_qwen3), tmp_path, async_save=async_save)
    rollouts = make_rollouts(config, 3)[: 3 if async_save else 2]
    # Saves of rollouts 0, 1 (fails) and, in the background, 2 (where the failure comes out).
    for answer in two_ranks.run_well(attempt_saves, config, rollouts, 30_000):
        (error,) = answer["errors"]
        assert error.startswith("2: " if async_save else "1: ")
        assert "checkpoint 2" in error
        assert "File too large" in error
        assert f"MiB are free in {tmp_path}" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", checkpoints.TRACKER]
    first, second = two_ranks.run_well(load_and_report, config)
    assert (first["first"], second["first"]) == (1, 1)


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_ranks_go_on_with_their_own_random_state(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, async_save: bool
) -> None:
    """In the background too: what is drawn while the checkpoint is written is drawn again."""
    config = saving(make_config(tiny_qwen3), tmp_path, async_save=async_save)
    before = two_ranks.run_well(advance_random_state, config)
    after = two_ranks.run_well(advance_random_state, config)
    assert after == before
    assert before[0] != before[1]


@pytest.mark.parametrize(("fp16", "scale"), [(True, (2.0**16, 2)), (False, (2.0**16, 0))])
def test_an_fp16_run_takes_the_loss_scale_of_a_checkpoint_that_has_one(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, fp16: bool, scale: tuple[float, int]
) -> None:
    before = make_config(tiny_qwen3, precision={"fp32": False, "fp16": fp16})
    rollouts = make_rollouts(before, 1)
    two_ranks.run_well(train_rollouts, saving(before, tmp_path), rollouts, 0, (0,))
    after = make_config(tiny_qwen3, precision={"fp32": False, "fp16": True})
    for found in two_ranks.run_well(load_and_report, saving(after, tmp_path)):
        assert found["scale"] == scale


def test_another_number_of_ranks_continues_with_its_own_random_state(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, optimizer=SCHEDULE), tmp_path)
    two_ranks.run_well(train_rollouts, config, make_rollouts(config, 2), 0, (1,))
    before = two_ranks.run_well(load_and_report, config)
    (alone,) = two_ranks.run_well(load_and_report, config, num_ranks=1)
    for key in ("first", "weights", "moments", "rate"):
        assert alone[key] == before[0][key] == before[1][key]
    assert alone["first"] == 2
    assert before[0]["rate"] > 0
    torch.manual_seed(derived_seed(config.algorithm.seed, 2, 0))
    assert alone["rng"][1] == torch.get_rng_state().numpy().tobytes()
    rollouts = make_rollouts(config, 3, dp_size=1)
    (more,) = two_ranks.run_well(train_rollouts, config, rollouts, 0, (2,), num_ranks=1)
    again = two_ranks.run_well(load_and_report, config)
    assert again[0]["weights"] == more["weights"]


def test_without_its_optimizer_a_checkpoint_continues_with_fresh_moments(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, optimizer=SCHEDULE), tmp_path, no_save_optim=True)
    rollouts = make_rollouts(config, 2)
    trained = two_ranks.run_well(train_rollouts, config, rollouts, 0, (1,))
    found, _ = two_ranks.run_well(load_and_report, config)
    assert not (tmp_path / "iter_0000002" / "optimizer").exists()
    assert found["weights"] == trained[0]["weights"]
    assert {value for _, value in found["moments"].values()} == {
        bytes(len(value)) for _, value in found["moments"].values()
    }
    # Four steps are done: one after the warm-up of three.
    assert found["rate"] == pytest.approx(1e-3 * 0.5 * (1 + torch.tensor(torch.pi / 5).cos()))


RNG_FILE = "rng_00000.safetensors"


@pytest.fixture
def saved(two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path) -> MilesConfig:
    config = saving(make_config(tiny_qwen3), tmp_path)
    two_ranks.run_well(train_rollouts, config, make_rollouts(config, 1), 0, (0,))
    return config


def refusal(two_ranks: Ranks, config: MilesConfig) -> str:
    first, second = two_ranks.run(start, config)
    assert isinstance(first, ConfigError)
    assert isinstance(second, Exception)
    assert str(config.checkpoint.load) in str(first)
    assert str(config.checkpoint.load) in str(second)
    return str(first)


def test_an_optimizer_shard_cut_short_is_refused_with_path_and_step(
    two_ranks: Ranks, saved: MilesConfig, tmp_path: Path
) -> None:
    shard = tmp_path / "iter_0000001" / "optimizer" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    text = refusal(two_ranks, saved)
    assert str(shard) in text
    assert "step 1" in text


@pytest.mark.parametrize(
    "name", ["model/__0_0.distcp", "optimizer/__1_0.distcp", "model/.metadata", RNG_FILE]
)
def test_a_file_of_zeros_is_refused_with_path_and_remedy_alone(
    two_ranks: Ranks, saved: MilesConfig, tmp_path: Path, name: str
) -> None:
    """As long as it was: only reading shows it."""
    file = tmp_path / "iter_0000001" / name
    file.write_bytes(bytes(file.stat().st_size))
    text = refusal(two_ranks, saved)
    assert f"step 1: {file} is damaged" in text
    assert "Restore it; it is the only step there" in text
    assert "weights_only" not in text
    assert "does not fit" not in text


def test_a_checkpoint_of_another_model_is_refused(
    two_ranks: Ranks, saved: MilesConfig, tiny_qwen3_untied: Path
) -> None:
    other = dataclasses.replace(saved.rollout, hf_checkpoint=str(tiny_qwen3_untied))
    text = refusal(two_ranks, dataclasses.replace(saved, rollout=other))
    assert "does not fit this model" in text
    assert "lm_head.weight" in text


def test_a_checkpoint_of_a_larger_model_is_refused(
    two_ranks: Ranks, tiny_qwen3: Path, tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    larger = saving(make_config(tiny_qwen3_untied), tmp_path)
    two_ranks.run_well(train_rollouts, larger, make_rollouts(larger, 1), 0, (0,))
    text = refusal(two_ranks, saving(make_config(tiny_qwen3), tmp_path))
    assert "does not fit this model" in text
    assert "lm_head.weight" in text


def test_a_reference_that_moved_stays_where_it_is_when_it_moves_no_more(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    moving = saving(make_config(tiny_qwen3, algorithm=REFERENCE), tmp_path)
    two_ranks.run_well(train_rollouts, moving, make_rollouts(moving, 3), 0, (2,))
    moved, _ = two_ranks.run_well(load_and_report, moving)
    still = saving(
        make_config(tiny_qwen3, algorithm=REFERENCE | {"ref_update_interval": None}), tmp_path
    )
    found, _ = two_ranks.run_well(load_and_report, still)
    assert found["ref"] == moved["ref"]
    two_ranks.run_well(train_rollouts, still, make_rollouts(still, 4), 0, (3,))
    later, _ = two_ranks.run_well(load_and_report, still)
    assert later["first"] == 4
    assert later["ref"] == moved["ref"]


def test_a_checkpoint_of_another_backend_is_refused(
    two_ranks: Ranks, saved: MilesConfig, tmp_path: Path
) -> None:
    path = tmp_path / "iter_0000001" / "metadata.json"
    path.write_text(path.read_text().replace('"backend": "fsdp"', '"backend": "megatron"'))
    assert "megatron" in refusal(two_ranks, saved)


def test_left_overs_of_a_killed_save_are_removed_at_the_next_start(
    two_ranks: Ranks, saved: MilesConfig, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000002.tmp")
    assert two_ranks.run_well(load_and_report, saved)[0]["first"] == 1
    assert not (tmp_path / "iter_0000002.tmp").exists()


@pytest.mark.full
def test_a_checkpoint_of_hybrid_sharding_continues_on_fewer_ranks(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    hybrid = saving(make_config(tiny_qwen3, fsdp={"dp_replicate_size": 2}), tmp_path)
    ranks = Ranks(4)
    try:
        rollouts = make_rollouts(hybrid, 2, dp_size=4)
        trained = ranks.run_well(train_rollouts, hybrid, rollouts, 0, (1,))
        found = ranks.run_well(load_and_report, hybrid)
    finally:
        ranks.close()
    fewer = two_ranks.run_well(load_and_report, saving(make_config(tiny_qwen3), tmp_path))
    for answer in (*found, *fewer):
        assert answer["weights"] == trained[0]["weights"]
        assert answer["moments"] == found[0]["moments"]
