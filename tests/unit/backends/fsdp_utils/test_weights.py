import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    as_bytes,
    export,
    make_config,
    weights_awake_and_asleep,
)

SMALL_FILES = 20_000
WHOLE = 10**9


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    files = sorted(path.glob("*.safetensors"))
    return {name: as_bytes(t) for file in files for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def mixed_dtypes(tiny_qwen3_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16, but one norm in fp32 with values that bf16 cannot hold."""
    path = tmp_path_factory.mktemp("mixed") / "model"
    shutil.copytree(tiny_qwen3_untied, path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].float() + 1e-6
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    "model",
    ["tiny_qwen3", "narrow_qwen3", "tiny_qwen3_untied", "mixed_dtypes", "tiny_qwen3_moe"],
)
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32", "bf16"])
def test_weights_leave_as_the_checkpoint_holds_them(
    two_ranks: Ranks, request: pytest.FixtureRequest, model: str, fp32: bool
) -> None:
    path: Path = request.getfixturevalue(model)
    config = make_config(path, precision={"fp32": fp32})
    for names, before, asleep, awake in two_ranks.run_well(weights_awake_and_asleep, config):
        assert len(names) == len(set(names))
        assert before == asleep == awake == stored(path)


def test_a_tied_parameter_goes_under_the_name_of_the_checkpoint(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_qwen3, path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for _, before, _, _ in two_ranks.run_well(weights_awake_and_asleep, make_config(path)):
        assert before == stored(path)


def test_an_fp16_run_hands_out_fp16_where_the_checkpoint_is_bf16(
    two_ranks: Ranks, tiny_qwen3_untied: Path
) -> None:
    config = make_config(tiny_qwen3_untied, precision={"fp32": False, "fp16": True})
    tensors = load_file(tiny_qwen3_untied / "model.safetensors")
    halves = {name: as_bytes(tensor.half()) for name, tensor in tensors.items()}
    for _, before, asleep, _ in two_ranks.run_well(weights_awake_and_asleep, config):
        assert before == asleep == halves


def test_an_export_replaces_no_directory_of_another_kind(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("irreplaceable")
    job = (export, make_config(tiny_qwen3), str(tmp_path / "home"), WHOLE, None)
    first, second = two_ranks.run(*job)
    assert isinstance(first, FileExistsError)
    assert "no Hugging Face directory" in str(second)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "irreplaceable"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "home"]


def test_an_export_is_not_stopped_by_what_a_killed_one_left(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    job = (export, make_config(tiny_qwen3), str(target), WHOLE, None)
    two_ranks.run_well(*job)
    for name in ("export.miles-old", "export.miles-tmp"):
        shutil.copytree(target, tmp_path / name)
    weights, _ = two_ranks.run_well(*job)
    assert stored(target) == weights
    assert sorted(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("shard_bytes", [WHOLE, SMALL_FILES])
def test_transformers_loads_an_export_bit_for_bit(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, shard_bytes: int
) -> None:
    target = tmp_path / "export"
    job = (export, make_config(tiny_qwen3), str(target), shard_bytes, None)
    weights, _ = two_ranks.run_well(*job)
    assert stored(target) == weights
    assert "lm_head.weight" not in weights
    index = target / "model.safetensors.index.json"
    if shard_bytes == SMALL_FILES:
        assert len(list(target.glob("*.safetensors"))) > 2
        assert set(json.loads(index.read_text())["weight_map"]) == set(weights)
    else:
        assert not index.exists()
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert {n: as_bytes(p) for n, p in model.named_parameters()} == weights
    assert AutoTokenizer.from_pretrained(target)("1+2")["input_ids"]
    assert sorted(tmp_path.iterdir()) == [target]


def test_the_config_of_an_fp16_export_names_its_dtype(
    two_ranks: Ranks, tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_qwen3_untied, precision={"fp32": False, "fp16": True})
    two_ranks.run_well(export, config, str(tmp_path / "export"), WHOLE, None)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_an_export_that_fails_leaves_the_older_one_and_fails_on_every_rank(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    job = (export, make_config(tiny_qwen3), str(target), WHOLE)
    two_ranks.run_well(*job, None)
    answers = two_ranks.run(*job, 50_000)
    assert all(isinstance(answer, Exception) for answer in answers)
    assert "export" in str(answers[1])
    for answer in answers:
        assert f"export to {target}: [Errno 27] File too large; " in str(answer)
        assert f"MiB are free in {tmp_path}" in str(answer)
    assert stored(target) == stored(tiny_qwen3)
    assert sorted(tmp_path.iterdir()) == [target]
