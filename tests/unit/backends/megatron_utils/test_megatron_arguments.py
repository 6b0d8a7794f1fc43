"""What a command line for Megatron is checked for, and what is derived."""

import json
import logging
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles.backends.megatron_utils import applies, architecture, arguments, package, refusals
from miles.config.command_line import Foreign, read_command_line
from miles.config.errors import ConfigError
from miles.config.root import MilesConfig
from miles.utils.arguments import parse_args, read_config
from tests.unit.backends.megatron_utils.made_lines import Line, problems


def test_the_derived_architecture_and_a_missing_sequence_parallel_are_said(line: Line) -> None:
    _, messages = read_config(line("--tensor-model-parallel-size", "2"))
    derived, doubt = messages
    assert derived.level == logging.INFO
    assert "--num-layers 2 --hidden-size 64" in derived.text
    assert "config.json" in derived.text
    assert doubt.level == logging.WARNING
    assert "without --sequence-parallel" in doubt.text


def test_given_architecture_flags_are_held_against_the_checkpoint(line: Line) -> None:
    config, messages = read_config(line())
    derived = config.megatron_argv[config.megatron_argv.index("--num-layers") :]
    again, silent = read_config(line(*derived))
    assert len(messages) == 1
    assert silent == []
    assert again.megatron_argv[-len(derived) :] == derived
    wrong = [word if word != "128" else "256" for word in derived]
    assert list(problems(line(*wrong))) == ["--ffn-hidden-size"]


def test_all_problems_are_reported_in_one_go(line: Line) -> None:
    argv = line(
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3"),
        *("--expert-model-parallel-size", "2", "--hidden-size", "wide", "--swiglu", "yes"),
        *("--lora-rank", "8", "--train-iters", "5", "--data-path", "a", "b"),
        *("--sequence-paralel", "--gradient-checkpointing", "--rollout-temperature", "0"),
        *("--recompute-granularity", "most"),
    )
    found = problems(argv)
    assert {flag for flag in found if "," not in flag} == {
        "--expert-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--hidden-size",
        "--swiglu",
        "--lora-rank",
        "--train-iters",
        "--data-path",
        "--sequence-paralel",
        "--gradient-checkpointing",
        "--rollout-temperature",
        "--recompute-granularity",
    }
    joined = [flag for flag in found if "," in flag]
    assert any(flag.startswith("--tensor-model-parallel-size, ") for flag in joined)
    assert "did you mean --sequence-parallel?" in found["--sequence-paralel"]
    assert found["--hidden-size"] == "invalid int value: 'wide'"
    assert "yes" in found["--swiglu"]
    assert "full" in found["--recompute-granularity"]
    # A size that cannot be read is no difference to the checkpoint.
    assert not any("--num-layers" in flag for flag in joined)


def test_a_flag_of_experts_on_a_dense_model_is_one_problem(line: Line) -> None:
    """The rest of the architecture is nothing that this user has given."""
    found = problems(line("--moe-router-topk", "2"))
    assert list(found) == ["--moe-router-topk"]
    assert "applies only to a mixture of experts" in found["--moe-router-topk"]
    assert list(problems(line("--num-experts", "4"))) == ["--num-experts"]


def test_what_only_megatron_finds_joins_the_list(line: Line) -> None:
    """Its validation wants a recompute method to be missing with selective recompute."""
    argv = line("--recompute-granularity", "selective", "--recompute-method", "uniform")
    found = problems([*argv, "--rollout-temperature", "0"])
    assert set(found) == {"--train-backend", "--rollout-temperature"}
    assert "recompute method is not yet supported for selective" in found["--train-backend"]


def test_a_command_line_asks_no_device_even_where_a_library_has_woken_it(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Hopper it would demand an environment that only trainers have."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    config, _ = read_config(line("--tensor-model-parallel-size", "2", "--sequence-parallel"))
    assert config.megatron_argv


def test_megatrons_model_config_is_checked_too(line: Line) -> None:
    """Full recompute needs a method, which only TransformerConfig demands."""
    found = problems(line("--recompute-granularity", "full"))
    assert "recompute_method" in found["--train-backend"]


def test_a_model_without_conversion_is_refused_with_those_that_have_one(
    line: Line, tiny_qwen3: Path, tmp_path: Path
) -> None:
    for path in tiny_qwen3.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    found = problems(line("--hf-checkpoint", str(tmp_path)))
    assert list(found) == ["--hf-checkpoint"]
    assert "qwen3" in found["--hf-checkpoint"]


def test_a_missing_model_is_one_problem(line: Line) -> None:
    assert list(problems(line("--hf-checkpoint", "nowhere"))) == ["--hf-checkpoint"]


def test_a_missing_megatron_is_the_problem_beside_unknown_flags(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_find", lambda: None)
    argv = line("--num-layers", "2", "--numlayers", "2", "--train-iters", "3")
    found = problems(argv)
    assert set(found) == {"--train-backend", "--numlayers", "--train-iters"}
    assert "[megatron]" in found["--train-backend"]
    with pytest.raises(ConfigError, match=r"\[megatron\]"):
        arguments.parse(MilesConfig())


def test_a_run_that_does_not_train_needs_no_megatron(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_find", lambda: None)
    config, _ = read_config(line("--debug-rollout-only", "--num-layers", "2"))
    assert config.megatron_argv == ()
    assert set(problems(line("--debug-rollout-only", "--numlayers", "2"))) == {"--numlayers"}


@pytest.mark.parametrize("flag", ["--actor-num-gpus-per-node", "--context-parallel-size"])
def test_a_number_of_ranks_below_one_is_one_problem(line: Line, flag: str) -> None:
    assert list(problems(line(flag, "0"))) == [flag]


def test_checking_leaves_torch_as_it_was(line: Line, capfd: pytest.CaptureFixture[str]) -> None:
    import sys

    import torch

    before = (torch.cuda.get_device_properties, torch.cuda.get_device_capability, sys.argv)
    capfd.readouterr()
    read_config(line("--tensor-model-parallel-size", "2", "--sequence-parallel"))
    assert before == (
        torch.cuda.get_device_properties,
        torch.cuda.get_device_capability,
        sys.argv,
    )
    assert capfd.readouterr().out == ""


def test_every_refused_flag_and_group_is_one_of_megatrons() -> None:
    from scripts.list_megatron_flags import megatron_parser

    parser = megatron_parser()
    options = refusals.reasons(parser)
    assert [name for name in refusals.REASONS if f"--{name}" not in options] == []
    titles = {group.title for group in parser._action_groups}  # pyright: ignore[reportPrivateUsage]
    assert [title for title in refusals.GROUPS if title not in titles] == []
    names = [option.removeprefix("--") for option in options]
    unused = [p for p in refusals.PREFIXES if not any(name.startswith(p) for name in names)]
    assert unused == []
    patterns = [pattern for row in applies.APPLIES for pattern in row.names.split()]
    passing = [name for name in names if options[f"--{name}"] is None]
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in passing)] == []


def test_every_flag_of_megatrons_is_known_to_have_an_effect_or_refused() -> None:
    """A flag that a new version brings belongs into one of the tables or, if Megatron does what it
    says, into the file."""
    from scripts.list_megatron_flags import megatron_flags, megatron_parser

    parser = megatron_parser()
    options = refusals.reasons(parser)
    patterns = [pattern for row in applies.APPLIES for pattern in row.names.split()]
    passing = {
        name
        for name in megatron_flags(parser)
        if options[f"--{name}"] is None
        and name not in architecture.ARCHITECTURE_FLAGS
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    assert passing == set(EFFECTIVE.read_text().split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--apply-wd-to-qk-layernorm",), "weight decay reaches all parameters"),
        (("--no-weight-decay-cond-type", "apply_wd_to_qk_layernorm"), "weight decay reaches all"),
        (("--rampup-batch-size", "1", "1", "8"), "--global-batch-size"),
        (("--lr-decay-samples", "100"), "optimizer steps"),
        (("--exit-interval", "3"), "Miles drives the loop"),
        (("--eval-iters", "3"), "--eval-prompt-data"),
        (("--log-interval", "3"), "--run-dir"),
        (("--tokenizer-model", "m"), "--hf-checkpoint"),
        (("--cross-entropy-loss-fusion",), "own head"),
        (("--muon-momentum", "0.9"), "Adam"),
        (("--tp-comm-overlap",), "as long as their samples"),
        (("--overlap-moe-expert-parallel-comm",), "interleave"),
        (("--init-method-std", "0.02"), "read from a checkpoint"),
        (("--distributed-timeout-seconds-after-init", "9"), "--distributed-timeout-minutes"),
        (("--ddp-average-in-collective",), "summed"),
        (("--moe-expert-capacity-factor", "1.0"), "the engines drop none"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_flag_without_effect_is_refused_with_the_reason(
    line: Line, flags: tuple[str, ...], reason: str
) -> None:
    found = problems(line(*flags))
    assert list(found) == [flags[0]]
    assert reason in found[flags[0]]


def test_what_asks_for_how_things_are_anyway_passes(line: Line) -> None:
    flags = "--no-position-embedding --attention-softmax-in-fp32 --no-masked-softmax-fusion"
    config, _ = read_config(line(*flags.split()))
    assert set(flags.split()) <= set(config.megatron_argv)


def test_the_optimizer_that_megatron_offloads_to_the_host_is_a_precision_aware_one(
    line: Line,
) -> None:
    aware, flags = "--use-precision-aware-optimizer", ("--optimizer-cpu-offload",)
    config, messages = read_config(line(*flags, "--optimizer-offload-fraction", "0.5"))
    assert aware in config.megatron_argv
    (said,) = [m for m in messages if m.text.startswith("--optimizer-cpu-offload")]
    assert aware in said.text
    assert said.level == logging.INFO
    config, messages = read_config(line(*flags, aware))
    assert config.megatron_argv.count(aware) == 1
    assert [m for m in messages if m.text.startswith("--optimizer-cpu-offload")] == []


def test_help_megatron_lists_its_groups_without_what_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help-megatron"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--tensor-model-parallel-size" in text
    assert "--recompute-granularity" in text
    for refused in ("--data-path", "--train-iters", "--rl-generation-lag", "--rollout-batch-size"):
        assert refused not in text


EFFECTIVE = Path(__file__).with_name("effective_flags.txt")


def made_directory(folder: Path, kind: str, **fields: Any) -> MilesConfig:
    """A config with a checkpoint of this architecture and two trainer ranks."""
    from transformers import AutoConfig

    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    }
    settings = {**sizes, **fields} if kind != "qwen3_5" else {"text_config": sizes}
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}")
    argv = ["--hf-checkpoint", str(folder), "--actor-num-gpus-per-node", "2"]
    return read_command_line([*argv, "--rollout-num-gpus", "1"]).config


def test_a_family_that_needs_a_spec_gets_it_even_beside_given_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "QWEN3_5_SPEC", "os.path join")
    config = made_directory(tmp_path, "qwen3_5")
    for foreign in ([], [Foreign(name="--num-layers", words=("4",))]):
        argv, _, _ = arguments.check(config, foreign)
        spec = argv.index("--spec")
        assert argv[spec + 1 : spec + 3] == ("os.path", "join")


@pytest.mark.parametrize(
    "words",
    [
        ("nowhere.at_all", "spec"),
        ("os.path", "nothing"),
        ("os",),
        ("os", "path"),
        ("raises_when_loaded", "spec"),
    ],
)
def test_a_spec_that_cannot_be_imported_or_is_none_is_refused(
    line: Line, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_when_loaded.py").write_text("raise ValueError('no such layer')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(problems(line("--spec", *words))) == ["--spec"]


def test_routers_of_a_mixture_train_by_the_algorithms_loss_alone_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setenv("WORLD_SIZE", "2")
    config = made_directory(tmp_path, "qwen3_moe", num_experts=4, moe_intermediate_size=24)
    found = []
    for foreign in ([], [Foreign(name="--moe-aux-loss-coeff", words=("0.01",))]):
        argv, wrong, _ = arguments.check(config, foreign)
        assert wrong == []
        args = arguments.parse(replace(config, megatron_argv=argv))
        assert args.num_experts == 4
        assert (args.moe_router_dtype, args.moe_token_dispatcher_type) == ("fp32", "alltoall")
        found.append((args.moe_router_load_balancing_type, args.moe_aux_loss_coeff))
    assert found == [("none", 0.0), ("aux_loss", 0.01)]
