"""Architectures that a module of --spec brings: phi3 of miles_plugins, and mistakes in one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config

from miles.backends.megatron_utils import arguments
from miles.backends.megatron_utils.architecture import UnknownArchitecture
from miles.backends.megatron_utils.bridge import BridgeError, converter_of, flags_of
from miles.config.command_line import Foreign, read_command_line
from miles.core.hf import load_config
from scripts.made_models import make_tokenizer
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import as_bytes, from_bytes, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    SUPERVISED,
    plain_training,
)
from tests.unit.backends.megatron_utils.engine_jobs import (
    make_config,
    train_rollouts,
    weights_at_start,
)
from tests.unit.backends.megatron_utils.test_conversion import assert_equal_directories, ran_well

SPEC = ("--spec", "miles_plugins.models.phi3", "get_phi3_spec")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
BRIDGE = "not a bridge"
"""What a module of --spec may have by mistake; this one."""


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi3")
    config = Phi3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_an_architecture_of_a_plugin_trains_like_one_plain_process(
    megatron_ranks: Ranks, phi3: Path
) -> None:
    config = make_config(phi3, *SPEC, *TP2, algorithm=SUPERVISED, optimizer=OPTIMIZER)
    rollouts = make_rollouts(config, NUM_ROLLOUTS, dp_size=1)
    steps, weights = plain_training(phi3)
    for answer in megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=2):
        for step, (loss, norm, _) in zip(answer["steps"], steps, strict=True):
            assert step.loss == pytest.approx(loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(norm, rel=1e-5)
        assert set(answer["weights"]) == set(weights)
        for name, value in answer["weights"].items():
            expected = weights[name].reshape(-1)
            torch.testing.assert_close(from_bytes(value), expected, atol=1e-5, rtol=0, msg=name)


def test_an_architecture_of_a_plugin_reaches_the_engines_bit_for_bit(
    megatron_ranks: Ranks, phi3: Path
) -> None:
    stored = load_file(phi3 / "model.safetensors")
    for answer in megatron_ranks.run_well(
        weights_at_start, make_config(phi3, *SPEC, *TP2), num_ranks=2
    ):
        assert answer == {name: as_bytes(tensor) for name, tensor in stored.items()}


@pytest.mark.full
def test_an_architecture_of_a_plugin_survives_both_conversions(phi3: Path, tmp_path: Path) -> None:
    there, back = str(tmp_path / "torch_dist"), str(tmp_path / "back")
    ran_well("convert_hf_to_torch_dist", "--hf-checkpoint", str(phi3), "--save", there, *SPEC)
    ran_well(
        *("convert_torch_dist_to_hf", "--load", there, "--hf-checkpoint", str(phi3)),
        *("--save", back, *SPEC),
    )
    assert_equal_directories(phi3, Path(back))


def test_the_command_line_gets_the_flags_of_the_plugins_architecture(phi3: Path) -> None:
    spec = Foreign(name=SPEC[0], words=SPEC[1:])
    argv, problems, _ = arguments.check(command_line(phi3), [spec])
    assert problems == []
    assert argv[argv.index("--num-query-groups") + 1] == "2"


def test_without_the_plugin_the_architecture_is_refused(phi3: Path) -> None:
    _, (problem,), _ = arguments.check(command_line(phi3), [])
    assert problem.flag == "--hf-checkpoint"
    assert "'phi3' has no conversion to Megatron" in problem.remedy
    assert "a --spec module may bring one" in problem.remedy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("no.such.module", "spec"), "cannot import 'no.such.module'"),
        ((__name__, "spec"), f"BRIDGE of {__name__} is a str, not a Bridge"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_a_problem_of_its_flag(
    phi3: Path, spec: tuple[str, str], message: str
) -> None:
    _, (problem,), _ = arguments.check(command_line(phi3), [Foreign(name="--spec", words=spec)])
    assert problem.flag == "--spec"
    assert message in problem.remedy
    with pytest.raises(BridgeError, match=message.split()[0]):
        converter_of(load_config(str(phi3)), spec)


def test_a_plugin_speaks_only_of_its_own_model_types() -> None:
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(UnknownArchitecture):
        flags_of(config, SPEC[1:])
    with pytest.raises(ValueError, match="'gpt2' has no converter"):
        converter_of(config, SPEC[1:])


@pytest.mark.parametrize("change", [{"sliding_window": 128}, {"partial_rotary_factor": 0.5}])
def test_a_phi3_that_megatron_would_compute_otherwise_is_refused(change: dict[str, Any]) -> None:
    config = Phi3Config(hidden_size=64, num_attention_heads=4)
    if "partial_rotary_factor" in change:
        config.rope_parameters |= change
    else:
        config.sliding_window = change["sliding_window"]
    with pytest.raises(UnknownArchitecture, match=next(iter(change))):
        flags_of(config, SPEC[1:])


def command_line(model: Path) -> Any:
    return read_command_line(["--hf-checkpoint", str(model), "--rollout-num-gpus", "1"]).config
