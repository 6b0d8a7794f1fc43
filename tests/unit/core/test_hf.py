import shutil
from pathlib import Path

import pytest

from miles.core.hf import CheckpointDirError, check_directory, text_config


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


def test_whether_embeddings_are_tied_is_what_the_whole_model_says() -> None:
    """Released Qwen3.5 checkpoints say it beside their text config, not in it."""
    from transformers import AutoConfig

    for tied in (False, True):
        config = AutoConfig.for_model("qwen3_5", tie_word_embeddings=tied)
        assert config.get_text_config().tie_word_embeddings is False
        assert text_config(config).tie_word_embeddings is tied
    alone = AutoConfig.for_model("qwen3", tie_word_embeddings=True)
    assert text_config(alone) is alone
