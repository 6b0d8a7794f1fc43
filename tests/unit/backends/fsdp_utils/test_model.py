import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from miles.config.errors import ConfigError
from miles.core.hf import CheckpointDirError
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    LENGTHS,
    as_bytes,
    buffers_and_log_probs,
    log_probs_of,
    make_config,
    make_groups,
    make_rollouts,
    reference_over_rollouts,
    start,
)
from tests.unit.backends.fsdp_utils.made_families import (
    CHANGES_LOGITS,
    FAMILIES,
    LEAKS,
    ROUTER_BIAS,
    Family,
    make_family,
)

PADDED = {"use_dynamic_batch_size": False, "micro_batch_size": 3}
TEMPERATURE = 0.7


def plain_stats(path: Path) -> dict[int, list[tuple[float, float]]]:
    """Each sample alone through transformers' eager attention, whole logits, fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stats: dict[int, list[tuple[float, float]]] = {}
    for sample in (s for group in make_groups(0, LENGTHS) for s in group):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        log_probs = torch.log_softmax(logits[-sample.response_length :] / TEMPERATURE, -1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        chosen = log_probs.gather(1, tokens[-sample.response_length :, None]).squeeze(1)
        stats[sample.index] = list(zip(chosen.tolist(), entropy.tolist(), strict=True))
    return stats


def assert_close(answers: list[Any], plain: dict[int, list[tuple[float, float]]]) -> None:
    found = answers[0]["stats"] | answers[1]["stats"]
    assert set(found) == set(plain)
    for index, values in plain.items():
        assert torch.allclose(torch.tensor(found[index]), torch.tensor(values), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_packed_and_padded_log_probs_equal_each_document_alone(
    two_ranks: Ranks, tmp_path: Path, family: Family
) -> None:
    path = make_family(tmp_path, family)
    plain = plain_stats(path)
    for data in ({}, PADDED):
        config = make_config(path, data=data, rollout={"rollout_temperature": TEMPERATURE})
        answers = two_ranks.run_well(log_probs_of, config, make_rollouts(config, 1))
        assert answers[0]["attention"] == "miles_sdpa"
        assert answers[0]["fused"]
        assert_close(answers, plain)


@pytest.mark.parametrize("family", CHANGES_LOGITS, ids=lambda family: family.name)
def test_a_model_that_changes_its_logits_is_not_fused(
    two_ranks: Ranks, tmp_path: Path, family: Family
) -> None:
    path = make_family(tmp_path, family)
    for data in ({}, PADDED):
        config = make_config(path, data=data, rollout={"rollout_temperature": TEMPERATURE})
        answers = two_ranks.run_well(log_probs_of, config, make_rollouts(config, 1))
        assert not answers[0]["fused"]
        assert_close(answers, plain_stats(path))


@pytest.mark.parametrize("family", LEAKS, ids=lambda family: family.name)
def test_a_model_that_looks_across_documents_is_refused_when_packed(
    two_ranks: Ranks, tmp_path: Path, family: Family
) -> None:
    path = make_family(tmp_path, family)
    for answer in two_ranks.run(start, make_config(path)):
        assert isinstance(answer, ConfigError)
        assert answer.problems[0].flag == "--use-dynamic-batch-size"
    config = make_config(path, data=PADDED, rollout={"rollout_temperature": TEMPERATURE})
    answers = two_ranks.run_well(log_probs_of, config, make_rollouts(config, 1))
    assert_close(answers, plain_stats(path))


def test_a_reference_of_another_family_has_its_own_log_probs(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    policy, reference = make_family(tmp_path, FAMILIES[1]), make_family(tmp_path, CHANGES_LOGITS[0])
    config = make_config(
        policy,
        algorithm={"ref_load": str(reference)},
        rollout={"rollout_temperature": TEMPERATURE},
    )
    answers = two_ranks.run_well(log_probs_of, config, make_rollouts(config, 1), "ref")
    assert_close(answers, plain_stats(reference))


def test_a_reference_that_looks_across_documents_is_refused_when_packed(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    reference = make_family(tmp_path, LEAKS[0])
    config = make_config(tiny_qwen3, algorithm={"ref_load": str(reference)})
    for answer in two_ranks.run(reference_over_rollouts, config, make_rollouts(config, 1)):
        assert isinstance(answer, ConfigError)
        assert answer.problems[0].flag == "--use-dynamic-batch-size"
        assert "--ref-load" in str(answer)


def test_a_missing_attention_package_is_refused_by_name(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = make_config(tiny_qwen3, fsdp={"attn_implementation": "flash_attention_3"})
    for answer in two_ranks.run(start, config):
        assert isinstance(answer, ConfigError)
        assert "flash_attn_interface" in str(answer)


def test_a_checkpoint_without_one_of_the_weights_is_refused(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_qwen3, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    first, second = two_ranks.run(start, make_config(broken))
    assert isinstance(first, CheckpointDirError)
    assert "model.layers.1.mlp.up_proj.weight" in str(first)
    assert "model.layers.1.mlp.up_proj.weight" in str(second)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 32}, "model.embed_tokens.weight is (96, 64) in the files and (32, 64) by"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is in the files, but"),
    ],
)
def test_a_config_that_describes_another_model_than_the_files_is_refused(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, changes: dict[str, int], says: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_qwen3, broken)
    config = json.loads((broken / "config.json").read_text())
    # The types of its layers are listed too.
    config["layer_types"] = config["layer_types"][: changes.get("num_hidden_layers")]
    (broken / "config.json").write_text(json.dumps({**config, **changes}))
    first, second = two_ranks.run(start, make_config(broken))
    assert isinstance(first, CheckpointDirError)
    assert says in str(first)
    assert says in str(second)


@pytest.mark.parametrize(
    ("others", "norm", "says"),
    [
        (torch.bfloat16, torch.float32, "mixes torch.bfloat16, torch.float32"),
        (torch.float16, torch.float16, "second moment underflows"),
    ],
)
def test_a_checkpoint_of_mixed_dtypes_or_fp16_needs_the_fp32_master(
    two_ranks: Ranks,
    tiny_qwen3_untied: Path,
    tmp_path: Path,
    others: torch.dtype,
    norm: torch.dtype,
    says: str,
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_qwen3_untied, path)
    tensors = {k: t.to(others) for k, t in load_file(path / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(norm)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = make_config(path, fsdp={"keep_fp32_master": False})
    for answer in two_ranks.run(start, config):
        assert isinstance(answer, ConfigError)
        assert answer.problems[0].flag == "--no-keep-fp32-master"
        assert says in str(answer)


def test_a_reference_routes_as_the_policy_does(two_ranks: Ranks, tmp_path: Path) -> None:
    path = make_family(tmp_path, ROUTER_BIAS)
    (bias,) = (t for k, t in load_file(path / "model.safetensors").items() if "e_score" in k)
    assert not torch.equal(bias, bias.bfloat16().float())
    config = make_config(path, precision={"fp32": False})
    for found in two_ranks.run_well(buffers_and_log_probs, config, make_rollouts(config, 1)):
        assert found["actor"] == found["ref"]
        assert as_bytes(bias) in found["ref"]["buffers"].values()
