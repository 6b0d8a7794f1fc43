"""Which directories a conversion takes, and what is said of the others."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.backends.training_utils import checkpoints
from miles.backends.training_utils.conversion_check import (
    check_model,
    check_new_checkpoint,
    check_new_model,
    check_step,
)
from miles.config.errors import Problem

Check = Callable[..., list[Problem]]
TARGETS = pytest.mark.parametrize("check", [check_new_checkpoint, check_new_model])


def made_step(save: Path, iteration: int, **metadata: object) -> Path:
    checkpoints.prepare_staging(save, iteration, [])
    return checkpoints.publish(save, iteration, metadata)


@TARGETS
def test_a_target_is_absent_or_empty(check: Check, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new" / "deep", tmp_path / "empty"):
        assert check(str(target), str(source)) == []


@TARGETS
def test_a_target_that_holds_anything_is_refused_with_the_remedy(
    check: Check, tmp_path: Path, tiny_qwen3: Path
) -> None:
    run, converted, own = tmp_path / "run", tmp_path / "converted", tmp_path / "own"
    made_step(run, 7)
    made_step(converted, 0, source="hf")
    own.mkdir()
    (own / "thesis.tex").touch()
    for target, names in (
        (run, f"iter_0000007, {checkpoints.TRACKER}"),
        (converted, f"{checkpoints.TRACKER}, release"),
        (tiny_qwen3, "chat_template.jinja, config.json, generation_config.json, ..."),
        (own, "thesis.tex"),
    ):
        (problem,) = check(str(target), str(tmp_path / "source"))
        assert (problem.flag, problem.value) == ("--save", str(target))
        assert f"is not empty ({names})" in problem.remedy
        assert "give another directory, or remove this one yourself" in problem.remedy


@TARGETS
def test_a_target_that_cannot_be_written_or_is_converted_is_refused(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "source").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert check(str(tmp_path / "source" / "new"), str(tmp_path / "source")) == []
    for target, says in (
        ("", "is required"),
        (str(tmp_path / "file"), "is a file"),
        ("/proc/new", "lies in /proc"),
        (str(tmp_path / "source" / ".." / "source"), "is the directory that is converted"),
        (str(tmp_path / "model" / "new"), f"lies in the model {tmp_path / 'model'}"),
    ):
        (problem,) = check(target, "", str(tmp_path / "source"), str(tmp_path / "model"))
        assert says in problem.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_model_is_written_beside_its_place(tmp_path: Path) -> None:
    target = tmp_path / "empty"
    target.mkdir()
    tmp_path.chmod(0o555)
    assert check_new_checkpoint(str(target)) == []
    (problem,) = check_new_model(str(target))
    assert problem.remedy == f"cannot be written: no permission in {tmp_path}"
    tmp_path.chmod(0o755)


def test_what_an_interrupted_conversion_left_is_no_obstacle_to_the_next(tmp_path: Path) -> None:
    made_step(tmp_path, 0, source="hf")
    (tmp_path / checkpoints.TRACKER).rename(tmp_path / f"{checkpoints.TRACKER}.tmp")
    checkpoints.prepare_staging(tmp_path, 0, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{checkpoints.TRACKER}.tmp",
        "release",
        "release.tmp",
    ]
    assert check_new_checkpoint(str(tmp_path), "hf") == []
    assert len(check_new_model(str(tmp_path), "hf")) == 1


def test_weights_of_another_origin_are_no_left_over(tmp_path: Path) -> None:
    """Megatron-LM's own, or a directory that only has the name."""
    release = tmp_path / "release"
    release.mkdir()
    for metadata in ({"sharded_backend": "torch_dist"}, None):
        (release / "metadata.json").write_text(json.dumps(metadata))
        (problem,) = check_new_checkpoint(str(tmp_path), "hf")
        assert "is not empty (release)" in problem.remedy


def test_a_model_is_a_whole_hugging_face_directory(tiny_qwen3: Path, tmp_path: Path) -> None:
    assert check_model(str(tiny_qwen3)) == []
    for path, says in (("", "is required"), (str(tmp_path), "has no config.json")):
        (problem,) = check_model(path)
        assert (problem.flag, problem.value) == ("--hf-checkpoint", path)
        assert says in problem.remedy


def test_a_step_is_complete_and_of_the_tools_backend_and_model(
    tiny_qwen3: Path, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    hf, save = str(tiny_qwen3), tmp_path / "save"
    model = checkpoints.model_of(hf)
    step = made_step(save, 1, backend="fsdp", model=model)
    assert check_step(str(save), "fsdp", hf) == []
    assert check_step(str(save), "fsdp", "") == []
    tool = "tools/convert_fsdp_to_hf.py"
    for load, backend, source, says in (
        ("", "fsdp", hf, "is required"),
        (str(tmp_path / "none"), "fsdp", hf, "does not exist"),
        (str(tmp_path), "fsdp", hf, "holds no checkpoint"),
        (str(step), "fsdp", hf, "is one step; give its parent directory"),
        (hf, "fsdp", hf, "is a Hugging Face directory"),
        (str(save), "megatron", hf, f"{step} was written by the fsdp backend; {tool} converts it"),
        (str(save), "fsdp", str(tiny_qwen3_moe), f"{step} is of another model"),
    ):
        (problem,) = check_step(load, backend, source)
        assert (problem.flag, problem.value) == ("--load", load)
        assert says in problem.remedy
