import json
import os
from pathlib import Path
from typing import Any

import pytest

from miles.backends.training_utils import checkpoints
from miles.config.errors import ConfigError


def save(folder: Path, iteration: int, content: str = "weights") -> Path:
    staging = checkpoints.prepare_staging(folder, iteration, ["model"])
    (staging / "model").mkdir()
    (staging / "model" / "shard").write_text(content)
    return checkpoints.publish(folder, iteration, {"backend": "fsdp"})


def remedy(load: Path) -> str:
    (problem,) = checkpoints.check_load(str(load), "fsdp")
    assert problem.flag == "--load"
    with pytest.raises(ConfigError, match="--load"):
        checkpoints.verify(checkpoints.resolve_load(str(load)) or load)
    return str(problem)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_step_is_found_through_the_tracker(tmp_path: Path) -> None:
    save(tmp_path, 7)
    step = save(tmp_path, 12)
    assert step == tmp_path / "iter_0000012"
    assert (tmp_path / checkpoints.TRACKER).read_text() == "12"
    assert checkpoints.resolve_load(str(tmp_path)) == step
    metadata = checkpoints.verify(step)
    assert metadata["iteration"] == 12
    assert metadata["files"] == {"model/shard": len("weights")}
    assert names(tmp_path) == ["iter_0000007", "iter_0000012", checkpoints.TRACKER]


@pytest.mark.parametrize("kind", ["missing", "empty", "other files", "half-written step"])
def test_a_directory_without_checkpoints_is_a_fresh_start_with_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    if kind != "missing":
        folder.mkdir()
    if kind == "other files":
        (folder / "metrics.jsonl").touch()
    if kind == "half-written step":
        (folder / "iter_0000003.tmp").mkdir()
    lines = list[str]()
    monkeypatch.setattr(checkpoints.log, "info", lambda text, *args: lines.append(text % args))
    assert checkpoints.resolve_load(str(folder)) is None
    (line,) = lines
    assert str(folder) in line
    assert checkpoints.check_load(str(folder), "fsdp") == []
    assert checkpoints.resolve_load(str(folder), announce=False) is None
    assert lines == [line], "the other processes of a job that look there say nothing"


def test_no_load_flag_is_a_fresh_start() -> None:
    assert checkpoints.resolve_load(None) is None


@pytest.mark.parametrize("content", ["", "twelve", "-3", "release", "12\n13", "\xb2", "1.0"])
def test_a_tracker_with_garbage_is_refused_and_names_the_steps_there(
    tmp_path: Path, content: str
) -> None:
    save(tmp_path, 12)
    (tmp_path / checkpoints.TRACKER).write_text(content, encoding="utf-8")
    text = remedy(tmp_path)
    assert str(tmp_path / checkpoints.TRACKER) in text
    assert "12" in text


def test_a_tracker_that_is_not_text_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / checkpoints.TRACKER).write_bytes(b"\xff\xfe\x00")
    assert checkpoints.TRACKER in remedy(tmp_path)


def test_steps_without_a_tracker_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 12)
    (tmp_path / checkpoints.TRACKER).unlink()
    text = remedy(tmp_path)
    assert "12" in text
    assert checkpoints.TRACKER in text


def test_weights_that_megatron_itself_released_are_a_first_start(tmp_path: Path) -> None:
    released = tmp_path / "release"
    released.mkdir()
    (released / checkpoints.METADATA).write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / checkpoints.TRACKER).write_text("release")
    assert checkpoints.check_load(str(tmp_path), "megatron") == []
    assert checkpoints.resolve_load(str(tmp_path)) == released
    assert checkpoints.is_weights_only(released)
    assert checkpoints.read_metadata(released)["iteration"] == 0


def test_a_step_of_megatron_itself_is_a_first_start_whatever_its_iteration(tmp_path: Path) -> None:
    step = checkpoints.step_dir(tmp_path, 500)
    step.mkdir()
    (step / checkpoints.METADATA).write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / checkpoints.TRACKER).write_text("500")
    assert checkpoints.resolve_load(str(tmp_path)) == step
    assert checkpoints.is_weights_only(step)
    assert checkpoints.verify(step)["iteration"] == 0


def test_converted_weights_are_published_as_a_release_and_not_pruned(tmp_path: Path) -> None:
    assert save(tmp_path, 0) == tmp_path / "release"
    assert (tmp_path / checkpoints.TRACKER).read_text() == "release"
    assert checkpoints.resolve_load(str(tmp_path)) == tmp_path / "release"
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    assert checkpoints.prune(tmp_path, 1) == [tmp_path / "iter_0000001", tmp_path / "iter_0000002"]
    assert names(tmp_path) == ["iter_0000003", checkpoints.TRACKER, "release"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    checkpoints.prepare_staging(tmp_path, 0, ["model"])
    assert checkpoints.read_tracker(tmp_path) is None
    checkpoints.recover(tmp_path)
    assert names(tmp_path) == []


MODEL: dict[str, str | int] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def of_a_model(folder: Path, model: object) -> str:
    checkpoints.prepare_staging(folder, 2, [])
    checkpoints.publish(folder, 2, {"backend": "fsdp", checkpoints.MODEL: model})
    return str(folder)


def test_a_step_of_another_model_is_told_with_both_values_and_the_way_out(tmp_path: Path) -> None:
    load = of_a_model(tmp_path / "ckpt", MODEL)
    here = write_model(tmp_path / "model", {**MODEL, "model_type": "llama", "hidden_size": 128})
    (problem,) = checkpoints.check_load(load, "fsdp", here)
    assert (problem.flag, problem.value) == ("--load", load)
    assert "model_type qwen3 instead of llama" in problem.remedy
    assert "hidden_size 64 instead of 128" in problem.remedy
    assert "num_hidden_layers" not in problem.remedy
    assert "give the --hf-checkpoint that it was trained from" in problem.remedy


@pytest.mark.parametrize(
    ("stored", "config"),
    [
        (MODEL, {**MODEL, "rope_theta": 10}),
        # Another version of a config may leave out what is its class's default.
        (MODEL, {"model_type": "qwen3", "hidden_size": 64, "vocab_size": 8}),
        ({}, MODEL),
        (None, MODEL),
    ],
)
def test_a_step_of_the_same_model_or_one_that_does_not_say_is_accepted(
    tmp_path: Path, stored: object, config: dict[str, Any]
) -> None:
    load = of_a_model(tmp_path / "ckpt", stored)
    assert checkpoints.check_load(load, "fsdp", write_model(tmp_path / "model", config)) == []


def test_an_older_step_and_a_directory_that_is_no_model_are_not_compared(tmp_path: Path) -> None:
    here = write_model(tmp_path / "model", MODEL)
    save(tmp_path / "older", 3)
    assert checkpoints.check_load(str(tmp_path / "older"), "fsdp", here) == []
    load = of_a_model(tmp_path / "ckpt", MODEL)
    assert checkpoints.check_load(load, "fsdp", str(tmp_path / "nowhere")) == []


def test_a_step_of_a_run_is_not_weights_only(tmp_path: Path) -> None:
    assert not checkpoints.is_weights_only(save(tmp_path, 3))


def test_a_missing_step_is_refused_with_its_path(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / checkpoints.TRACKER).write_text("9")
    text = remedy(tmp_path)
    assert str(tmp_path / "iter_0000009") in text
    assert "3" in text


def test_a_step_given_instead_of_its_parent_is_refused_with_the_parent(tmp_path: Path) -> None:
    step = save(tmp_path, 12)
    assert repr(str(tmp_path)) in remedy(step)


def test_a_hugging_face_directory_is_refused_with_the_flag_that_takes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert "--hf-checkpoint" in remedy(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (problem,) = checkpoints.check_load(str(tmp_path / "x"), "fsdp")
    assert "file" in problem.remedy


def test_a_file_cut_short_is_refused_with_path_and_step(tmp_path: Path) -> None:
    step = save(tmp_path, 12)
    (step / "model" / "shard").write_text("weig")
    text = remedy(tmp_path)
    assert str(step / "model" / "shard") in text
    assert "step 12" in text
    assert "4 bytes instead of 7" in text


def test_a_file_that_is_gone_is_refused_with_path_and_step(tmp_path: Path) -> None:
    step = save(tmp_path, 12)
    (step / "model" / "shard").unlink()
    assert f"{step / 'model' / 'shard'} is missing" in remedy(tmp_path)


def test_what_to_do_about_a_damaged_step_depends_on_what_else_is_there(tmp_path: Path) -> None:
    step = save(tmp_path, 12)
    (step / "model" / "shard").unlink()
    assert "Restore it; it is the only step there" in remedy(tmp_path)
    save(tmp_path, 10)
    (tmp_path / checkpoints.TRACKER).write_text("12")
    assert f"write another step into {tmp_path / checkpoints.TRACKER} (there are 10)" in remedy(
        tmp_path
    )


def test_a_damaged_conversion_is_to_be_made_again(tmp_path: Path) -> None:
    step = save(tmp_path, 0)
    (step / "model" / "shard").unlink()
    text = remedy(tmp_path)
    assert "what was converted is damaged" in text
    assert "Restore it, or convert again" in text


@pytest.mark.parametrize("content", [None, "{", "[]", '{"files": 3}'])
def test_a_step_without_readable_metadata_is_refused(tmp_path: Path, content: str | None) -> None:
    step = save(tmp_path, 12)
    if content is None:
        (step / checkpoints.METADATA).unlink()
    else:
        (step / checkpoints.METADATA).write_text(content)
    assert str(step) in remedy(tmp_path)


def test_what_the_driver_staged_survives_and_what_a_failed_attempt_left_does_not(
    tmp_path: Path,
) -> None:
    staging = checkpoints.staging_dir(tmp_path, 4)
    checkpoints.mark_requested(tmp_path, 4)
    (staging / "rollout_state.json").touch()
    (staging / "model").mkdir()
    (staging / "rng_00007.safetensors").touch()
    checkpoints.prepare_staging(tmp_path, 4, ["model", "rng_*"])
    assert names(staging) == [checkpoints.REQUESTED, "rollout_state.json"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4, "first")
    step = save(tmp_path, 4, "second")
    assert (step / "model" / "shard").read_text() == "second"
    assert names(tmp_path) == ["iter_0000004", checkpoints.TRACKER]


def test_a_crash_while_a_step_is_replaced_loses_nothing(tmp_path: Path) -> None:
    step = save(tmp_path, 4, "first")
    checkpoints.prepare_staging(tmp_path, 4, [])
    step.rename(step.with_name(step.name + ".old"))
    found = checkpoints.resolve_load(str(tmp_path))
    assert found is not None
    assert (found / "model" / "shard").read_text() == "first"
    checkpoints.recover(tmp_path)
    assert names(tmp_path) == ["iter_0000004", checkpoints.TRACKER]
    checkpoints.verify(step)


def test_left_overs_of_a_crash_are_removed_and_complete_steps_are_not(tmp_path: Path) -> None:
    save(tmp_path, 4)
    for name in ("iter_0000005.tmp", "iter_0000001.gone", "iter_0000004.old"):
        (tmp_path / name).mkdir()
    checkpoints.recover(tmp_path)
    assert names(tmp_path) == ["iter_0000004", checkpoints.TRACKER]
    checkpoints.recover(tmp_path / "missing")


def test_a_failed_publication_leaves_the_older_step_current(tmp_path: Path) -> None:
    save(tmp_path, 4)
    checkpoints.prepare_staging(tmp_path, 5, [])
    (tmp_path / f"{checkpoints.TRACKER}.tmp").mkdir()
    with pytest.raises(OSError, match=checkpoints.TRACKER):
        checkpoints.publish(tmp_path, 5, {})
    assert checkpoints.read_tracker(tmp_path) == 4
    assert checkpoints.check_load(str(tmp_path), "fsdp") == []


def test_the_tracker_moves_only_after_every_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    trackers: list[bool] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        trackers.append((tmp_path / checkpoints.TRACKER).exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 4)
    before = synced[: trackers.index(True)]
    assert {"shard", "model", checkpoints.METADATA, "iter_0000004.tmp"} <= set(before)
    assert before[-1] == f"{checkpoints.TRACKER}.tmp"
    assert synced[-1] == tmp_path.name


def test_retention_keeps_the_newest_and_those_asked_for(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        if iteration == 1:
            checkpoints.mark_requested(tmp_path, iteration)
        save(tmp_path, iteration)
        checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000003", checkpoints.TRACKER]
    assert checkpoints.prune(tmp_path, None) == []


def test_retention_never_removes_the_step_of_the_tracker(tmp_path: Path) -> None:
    for iteration in (5, 9):
        save(tmp_path, iteration)
    # Somebody went back to step 5: what the run saves next is older than step 9.
    (tmp_path / checkpoints.TRACKER).write_text("5")
    save(tmp_path, 6)
    assert checkpoints.prune(tmp_path, 1) == [tmp_path / "iter_0000005"]
    assert checkpoints.resolve_load(str(tmp_path)) == tmp_path / "iter_0000006"


def test_the_sentinel_is_seen_and_cleared(tmp_path: Path) -> None:
    path = str(tmp_path / "save_now")
    assert not checkpoints.sentinel_requested(None)
    assert not checkpoints.sentinel_requested(path)
    Path(path).touch()
    assert checkpoints.sentinel_requested(path)
    checkpoints.clear_sentinel(path)
    checkpoints.clear_sentinel(path)
    assert not checkpoints.sentinel_requested(path)


def test_the_inside_of_a_step_is_no_fresh_start(tmp_path: Path) -> None:
    step = save(tmp_path, 3)
    (step / "model" / ".metadata").touch()
    assert "lies within a step" in remedy(step / "model")
