from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.training_utils.hf_export import check_export_target, check_target, export_hf
from miles.backends.training_utils.hf_files import HFFiles
from miles.config.errors import ConfigError
from miles.contracts.types import NamedTensor


def test_a_target_that_cannot_be_written_or_is_the_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "file").touch()
    check_target(str(tmp_path / "new"), str(source))
    with pytest.raises(ConfigError, match=r"--save = .*is a file"):
        check_target(str(tmp_path / "file"), str(source))
    with pytest.raises(ConfigError, match=r"--save = .*that is converted"):
        check_target(str(source / ".." / "source"), str(source))


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
        check_export_target(str(target), str(source))
        export(source, target, value)
        assert load_file(target / "model.safetensors")["a"].tolist() == [value, value]


def test_a_model_that_no_export_wrote_is_not_replaced(tmp_path: Path) -> None:
    source, other = made_model(tmp_path / "source", 0.0), made_model(tmp_path / "other", 3.0)
    with pytest.raises(ConfigError, match=r"--save = .*no export of this program"):
        check_export_target(str(other), str(source))
    with pytest.raises(FileExistsError, match="no export of this program"):
        export(source, other, 1.0)
    assert load_file(other / "model.safetensors")["a"].tolist() == [3.0, 3.0]
    assert not (tmp_path / "other.tmp").exists()


def test_an_export_into_which_someone_put_other_weights_is_not_replaced(tmp_path: Path) -> None:
    source, target = made_model(tmp_path / "source", 0.0), tmp_path / "out"
    export(source, target, 1.0)
    save_file({"b": torch.ones(1)}, target / "more.safetensors")
    with pytest.raises(ConfigError, match="no export of this program"):
        check_export_target(str(target), str(source))


def test_a_directory_with_other_files_is_refused_with_flag_and_remedy(tmp_path: Path) -> None:
    source, target = made_model(tmp_path / "source", 0.0), tmp_path / "out"
    target.mkdir()
    check_export_target(str(target), str(source))
    (target / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"--save = .*no Hugging Face directory.*give another"):
        check_export_target(str(target), str(source))
