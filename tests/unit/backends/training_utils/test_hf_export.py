from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.training_utils.export_mark import reason_against_replacing
from miles.backends.training_utils.hf_export import export_hf
from miles.backends.training_utils.hf_files import HFFiles
from miles.contracts.types import NamedTensor


def made_model(folder: Path, value: float) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "made"}')
    save_file({"a": torch.full((2,), value)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def export(source: Path, target: Path, value: float) -> None:
    stream = iter([NamedTensor("a", torch.full((2,), value))])
    export_hf(str(target), str(source), list(HFFiles(source).headers.values()), stream)


def test_an_export_replaces_an_export_and_stays_a_plain_safetensors_file(tmp_path: Path) -> None:
    source, target = made_model(tmp_path / "source", 0.0), tmp_path / "out"
    for value in (1.0, 2.0):
        export(source, target, value)
        assert load_file(target / "model.safetensors")["a"].tolist() == [value, value]


def test_a_model_that_no_export_wrote_is_not_replaced(tmp_path: Path) -> None:
    source, other = made_model(tmp_path / "source", 0.0), made_model(tmp_path / "other", 3.0)
    with pytest.raises(FileExistsError, match="no export of this program"):
        export(source, other, 1.0)
    assert load_file(other / "model.safetensors")["a"].tolist() == [3.0, 3.0]
    assert sorted(tmp_path.iterdir()) == [other, source]


def test_an_export_into_which_someone_put_other_weights_is_not_replaced(tmp_path: Path) -> None:
    source, target = made_model(tmp_path / "source", 0.0), tmp_path / "out"
    export(source, target, 1.0)
    save_file({"b": torch.ones(1)}, target / "more.safetensors")
    with pytest.raises(FileExistsError, match="no export of this program"):
        export(source, target, 2.0)


def test_an_export_to_a_link_lies_where_the_link_leads(tmp_path: Path) -> None:
    source = made_model(tmp_path / "source", 0.0)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for value in (1.0, 2.0):
        export(source, tmp_path / "link", value)
        assert load_file(tmp_path / "disk" / "model.safetensors")["a"].tolist() == [value, value]
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "source"]


def test_an_export_removes_no_directory_of_someone_else(tmp_path: Path) -> None:
    source, target = made_model(tmp_path / "source", 0.0), tmp_path / "out"
    for name in ("out.old", "out.tmp"):
        made_model(tmp_path / name, 3.0)
    for value in (1.0, 2.0):
        export(source, target, value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out",
        "out.old",
        "out.tmp",
        "source",
    ]


def test_the_place_of_a_mounted_file_system_is_not_replaced() -> None:
    assert "give a directory in it" in str(reason_against_replacing("/"))
