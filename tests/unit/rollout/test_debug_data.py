import math
from pathlib import Path
from typing import Any

import pytest

from miles.config.errors import ConfigError
from miles.contracts.types import Prompt, Sample, Status
from miles.rollout.debug_data import check, check_record, load_groups, save_groups
from tests.unit.rollout.scripted import made_config


def made_group() -> list[Sample]:
    prompt = Prompt(
        group_id=3,
        text="p",
        tokens=(5, 6),
        messages=({"role": "user", "content": "p"},),
        tools=({"name": "t"},),
        label="l",
        metadata={"k": [1, {"n": None}]},
    )
    full = Sample(
        prompt=prompt,
        index=6,
        tokens=[5, 6, 7, 8],
        response_length=2,
        response="xy",
        loss_mask=[0, 1],
        rollout_log_probs=[math.nan, -1.0000000000000002],
        weight_versions=[1, 2],
        status=Status.TRUNCATED,
        reward={"score": 0.1, "why": "so"},
        remove_sample=True,
        metadata={"turns": 2},
    )
    return [full, Sample(prompt=prompt, index=7, tokens=[5, 6], status=Status.FAILED)]


def test_a_recorded_rollout_is_read_back_exactly(tmp_path: Path) -> None:
    template = str(tmp_path / "deep" / "r{rollout_id}.msgpack")
    path = save_groups(template, 12, [made_group()])
    assert path.name == "r12.msgpack"
    assert [p.name for p in path.parent.iterdir()] == ["r12.msgpack"], "nothing else is left"
    (group,) = load_groups(template, 12)
    first, second = group
    assert math.isnan(first.rollout_log_probs[0])
    first.rollout_log_probs[0] = 0.0
    wanted = made_group()
    wanted[0].rollout_log_probs[0] = 0.0
    assert group == wanted
    assert first.prompt is second.prompt
    assert isinstance(first.status, Status)


def test_a_missing_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    template = str(tmp_path / "r{rollout_id}")
    with pytest.raises(ConfigError, match="no such file"):
        load_groups(template, 0)
    (tmp_path / "r1").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="not a recorded rollout"):
        load_groups(template, 1)
    path = save_groups(template, 2, [made_group()])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="a damaged record"):
        load_groups(template, 2)


def test_a_first_rollout_that_cannot_be_read_is_seen_without_reading_it_all(tmp_path: Path) -> None:
    template = str(tmp_path / "r{rollout_id}")
    save_groups(template, 3, [made_group()])
    assert check_record(template, 3) == []
    (problem,) = check_record(template, 4)
    assert (problem.value, problem.flag) == (f"{tmp_path}/r4", "--load-debug-rollout-data")
    assert "no such file" in problem.remedy
    (tmp_path / "r4").write_bytes(b"garbage")
    (problem,) = check_record(template, 4)
    assert "not a recorded rollout" in problem.remedy


def test_metadata_that_is_not_plain_is_named(tmp_path: Path) -> None:
    group = made_group()
    group[1].metadata["object"] = object()
    with pytest.raises(ValueError, match="metadata of sample 7"):
        save_groups(str(tmp_path / "r{rollout_id}"), 0, [group])


def test_a_path_without_rollout_id_is_refused() -> None:
    changes: dict[str, Any] = {"save_debug_rollout_data": "a", "load_debug_rollout_data": "b"}
    assert [p.value for p in check(made_config(**changes))] == ["a", "b"]
