import json
import shutil
from pathlib import Path

import pytest

from miles.core.hf import CheckpointDirError, check_directory, dtype_name


@pytest.fixture
def model(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))


def test_a_whole_directory_is_fine(model: Path) -> None:
    check_directory(str(model))


def test_a_config_that_is_not_json_is_named(model: Path) -> None:
    (model / "config.json").write_text("{broken")
    with pytest.raises(CheckpointDirError, match=r"config\.json is not JSON"):
        check_directory(str(model))


def test_weights_that_are_cut_short_are_named(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointDirError, match=r"model\.safetensors is damaged or cut short"):
        check_directory(str(model))


def test_the_dtype_is_the_configs_or_where_it_says_none_that_of_the_weights(
    tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    assert dtype_name(str(tiny_qwen3_untied)) == "bfloat16"
    silent = Path(shutil.copytree(tiny_qwen3_untied, tmp_path / "silent"))
    config = json.loads((silent / "config.json").read_text())
    del config["dtype"]
    (silent / "config.json").write_text(json.dumps(config))
    assert dtype_name(str(silent)) == "bfloat16"
