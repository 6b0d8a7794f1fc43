"""Checkpoints of Megatron's ranks that are refused, cleared away, or looked for."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from miles.backends.training_utils import checkpoints
from miles.config.errors import ConfigError
from miles.config.root import MilesConfig
from scripts.made_models import make_qwen3
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    WHOLE,
    make_config,
    make_rollouts,
    save_displaced,
    saving,
    start,
    train_rollouts,
)


@pytest.fixture
def saved(megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path) -> MilesConfig:
    config = saving(make_config(tiny_qwen3), tmp_path)
    megatron_ranks.run_well(train_rollouts, config, make_rollouts(config, 1, 2), (0,), num_ranks=2)
    return config


def refusal(ranks: Ranks, config: MilesConfig) -> str:
    answers = ranks.run(start, config, num_ranks=2)
    assert all(isinstance(answer, Exception) for answer in answers)
    refusals = [str(answer) for answer in answers if isinstance(answer, ConfigError)]
    assert refusals
    return refusals[0]


def test_damaged_or_foreign_checkpoints_are_refused(
    megatron_ranks: Ranks,
    saved: MilesConfig,
    tiny_qwen3: Path,
    tiny_qwen3_untied: Path,
    tmp_path: Path,
) -> None:
    step = tmp_path / "iter_0000001"
    other = make_config(tiny_qwen3_untied)
    text = refusal(megatron_ranks, dataclasses.replace(other, checkpoint=saved.checkpoint))
    assert "does not fit this model" in text
    assert "output_layer.weight" in text

    longer = make_qwen3(tmp_path / "longer", alphabet="".join(map(chr, range(33, 160))))
    other = make_config(longer)
    text = refusal(megatron_ranks, dataclasses.replace(other, checkpoint=saved.checkpoint))
    assert "its vocabulary has 96 tokens, the model's 160" in text

    wider = make_qwen3(tmp_path / "wider", head_dim=32)
    other = make_config(wider)
    text = refusal(megatron_ranks, dataclasses.replace(other, checkpoint=saved.checkpoint))
    assert "does not fit this model" in text
    assert "mismatch" in text
    assert "for key decoder.layers.self_attention." in text

    whole = make_config(tiny_qwen3, WHOLE)
    text = refusal(megatron_ranks, dataclasses.replace(saved, megatron_argv=whole.megatron_argv))
    assert "--use-distributed-optimizer" in text

    metadata = (step / "metadata.json").read_text()
    (step / "metadata.json").write_text(
        metadata.replace('"backend": "megatron"', '"backend": "fsdp"')
    )
    assert "fsdp" in refusal(megatron_ranks, saved)
    (step / "metadata.json").write_text(metadata)

    inside = dataclasses.replace(saved.checkpoint, load=str(step), save=None)
    assert repr(str(tmp_path)) in refusal(
        megatron_ranks, dataclasses.replace(saved, checkpoint=inside)
    )

    shard = step / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:1000])
    text = refusal(megatron_ranks, saved)
    assert str(shard) in text
    assert "step 1" in text
    shard.write_bytes(content)

    # As long as it was: only reading shows it.
    for file in (shard, step / ".metadata"):
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        text = refusal(megatron_ranks, saved)
        assert f"step 1: {file} is damaged" in text
        assert "does not fit" not in text
        file.write_bytes(whole)
    assert megatron_ranks.run_well(start, saved, num_ranks=2) == [1, 1]


def test_master_weights_that_are_not_those_of_the_weights_are_refused(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, precision={"fp32": False}), tmp_path)
    megatron_ranks.run_well(save_displaced, config, num_ranks=2)
    text = refusal(megatron_ranks, config)
    assert "--load" in text
    assert "iter_0000001: its master weights and moments are not those of its weights" in text
    assert "parameters, among them decoder.layers.1." in text
    assert "tools/convert_torch_dist_to_hf.py" in text


def test_layers_of_another_kind_are_named(
    megatron_ranks: Ranks, saved: MilesConfig, tiny_qwen3_moe: Path
) -> None:
    other = make_config(tiny_qwen3_moe)
    text = refusal(megatron_ranks, dataclasses.replace(other, checkpoint=saved.checkpoint))
    assert "does not fit this model" in text
    assert "mlp.router.weight" in text


def test_weights_are_found_in_a_converted_directory_alone(tmp_path: Path) -> None:
    from miles.backends.megatron_utils.checkpoint import find_weights

    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").touch()
    assert find_weights("--ref-load", str(hf)) is None
    checkpoints.prepare_staging(tmp_path / "w", 0, [])
    metadata = {"backend": "megatron", **checkpoints.WEIGHTS_ONLY}
    step = checkpoints.publish(tmp_path / "w", 0, metadata)
    assert find_weights("--ref-load", str(tmp_path / "w")) == step
    for wrong in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="--ref-load"):
            find_weights("--ref-load", str(wrong))
    checkpoints.prepare_staging(tmp_path / "other", 3, [])
    inside = checkpoints.publish(tmp_path / "other", 3, {"backend": "fsdp"})
    with pytest.raises(ConfigError, match="written by the fsdp backend"):
        find_weights("--ref-load", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="--ref-load"):
        find_weights("--ref-load", str(inside))


def test_left_overs_of_a_killed_save_are_removed_at_the_next_start(
    megatron_ranks: Ranks, saved: MilesConfig, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000002.tmp")
    assert megatron_ranks.run_well(start, saved, num_ranks=2) == [1, 1]
    assert not (tmp_path / "iter_0000002.tmp").exists()
