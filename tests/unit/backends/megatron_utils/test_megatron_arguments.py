"""From one command line to Megatron's namespace in a trainer process."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.backends.megatron_utils import (
    architecture,
    arguments,
    machine,
    namespace,
    package,
    refusals,
)
from miles.config.command_line import Foreign, read_command_line
from miles.config.errors import ConfigError
from miles.config.root import MilesConfig
from miles.utils.arguments import parse_args, read_config

pytestmark = pytest.mark.megatron

Line = Callable[..., list[str]]


@pytest.fixture
def line(tiny_qwen3: Path, tmp_path: Path) -> Line:
    """A valid command line with two trainer ranks, plus arguments."""
    prompts = tmp_path / "train.jsonl"
    prompts.write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")

    def make(*more: str) -> list[str]:
        return [
            *("--actor-num-gpus-per-node", "2"),
            *("--hf-checkpoint", str(tiny_qwen3), "--prompt-data", str(prompts)),
            *("--label-key", "label", "--rm-type", "math"),
            *("--num-rollout", "5", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "8", "--rollout-num-gpus", "1"),
            *more,
        ]

    return make


def problems(argv: list[str]) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read_config(argv)
    return {problem.flag: problem.remedy for problem in error.value.problems}


def in_a_trainer(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, world_size: int = 2
) -> argparse.Namespace:
    config, _ = read_config(argv)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return arguments.parse(config)


def test_the_plainest_command_line_trains_the_checkpoint_as_it_is(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are those of the tiny model in ``scripts/made_models.py``."""
    import torch

    args = in_a_trainer(line(), monkeypatch)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (2, 64, 128)
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels) == (4, 2, 16)
    assert args.swiglu
    assert args.qk_layernorm
    assert not args.add_bias_linear
    assert not args.untie_embeddings_and_output_weights
    assert (args.normalization, args.position_embedding_type) == ("RMSNorm", "rope")
    assert args.max_position_embeddings == 2048
    assert (args.vocab_size, args.padded_vocab_size) == (96, 96)
    assert args.params_dtype is torch.bfloat16
    assert args.use_distributed_optimizer
    assert (args.attention_dropout, args.hidden_dropout) == (0.0, 0.0)
    assert (args.rank, args.world_size, args.data_parallel_size) == (1, 2, 2)


def test_shared_flags_have_the_values_of_the_config(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 rollouts of 8 samples in steps of 4 are 10 optimizer steps."""
    import torch

    argv = line("--lr", "3e-5", "--clip-grad", "0.5", "--adam-beta2", "0.98", "--seed", "7")
    argv += ["--weight-decay", "0.1", "--global-batch-size", "4", "--fp32", "--adam-eps", "1e-7"]
    args = in_a_trainer(argv, monkeypatch)
    assert (args.lr, args.clip_grad, args.adam_beta2, args.seed) == (3e-5, 0.5, 0.98, 7)
    assert (args.weight_decay, args.start_weight_decay, args.adam_eps) == (0.1, 0.1, 1e-7)
    assert args.train_iters == 10
    assert args.params_dtype is torch.float32
    assert not args.bf16


def test_what_megatron_writes_by_itself_is_off_and_gradients_are_sums(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "save")
    argv = line("--save", folder, "--load", folder, "--async-save")
    args = in_a_trainer([*argv, "--tensorboard-dir", folder], monkeypatch)
    assert (args.save, args.load, args.async_save, args.tensorboard_dir) == (
        None,
        None,
        False,
        None,
    )
    assert args.calculate_per_token_loss


def test_a_machine_without_kernels_gets_the_flags_that_it_needs(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(package, "has_fused_weight_gradients", lambda: False)
    monkeypatch.setattr(machine, "_has_accelerator", lambda: False)
    args = in_a_trainer(line(), monkeypatch)
    assert args.transformer_impl == "local"
    assert args.no_persist_layer_norm
    assert args.distributed_backend == "gloo"
    assert args.use_cpu_initialization
    off = (
        args.gradient_accumulation_fusion,
        args.apply_rope_fusion,
        args.masked_softmax_fusion,
        args.bias_swiglu_fusion,
        args.bias_dropout_fusion,
    )
    assert not any(off)
    assert machine.reason().startswith("no Transformer Engine, no Apex's fused weight gradients, ")


def test_a_machine_with_everything_gets_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(package, "has_fused_weight_gradients", lambda: True)
    monkeypatch.setattr(machine, "_has_accelerator", lambda: True)
    assert machine.flags() == ()


def test_the_users_own_flags_win_over_what_is_derived(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = line("--make-vocab-size-divisible-by", "128", "--max-position-embeddings", "512")
    args = in_a_trainer(argv, monkeypatch)
    assert args.padded_vocab_size == 128
    assert args.max_position_embeddings == 512


def test_vocabularies_are_padded_for_every_tensor_parallel_rank(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 rows are not a multiple of 64 x 2 ranks."""
    argv = line("--tensor-model-parallel-size", "2", "--sequence-parallel")
    argv += ["--make-vocab-size-divisible-by", "64"]
    args = in_a_trainer(argv, monkeypatch)
    assert args.padded_vocab_size == 128
    assert args.sequence_parallel


def test_context_parallelism_is_megatrons_too_and_scales_the_budget(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.config.derived import token_budget

    argv = line("--context-parallel-size", "2", "--use-dynamic-batch-size")
    argv += ["--max-tokens-per-gpu", "100", "--rollout-max-response-len", "150"]
    args = in_a_trainer(argv, monkeypatch)
    assert (args.context_parallel_size, args.data_parallel_size) == (2, 1)
    assert token_budget(read_config(argv)[0]) == 200
    long = problems([*argv, "--rollout-max-response-len", "250"])
    assert "its 2 GPUs (--context-parallel-size 2" in long.popitem()[1]


def test_the_derived_architecture_and_a_missing_sequence_parallel_are_said(line: Line) -> None:
    _, messages = read_config(line("--tensor-model-parallel-size", "2"))
    architecture, warning = messages
    assert "--num-layers 2 --hidden-size 64" in architecture
    assert "config.json" in architecture
    assert "without --sequence-parallel" in warning


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


def test_what_only_megatron_finds_joins_the_list(line: Line) -> None:
    """Its validation wants a recompute method to be missing with selective recompute."""
    argv = line("--recompute-granularity", "selective", "--recompute-method", "uniform")
    found = problems([*argv, "--rollout-temperature", "0"])
    assert set(found) == {"--train-backend", "--rollout-temperature"}
    assert "recompute method is not yet supported for selective" in found["--train-backend"]


def test_megatrons_model_config_is_checked_too(line: Line) -> None:
    """Full recompute needs a method, which only TransformerConfig demands."""
    found = problems(line("--recompute-granularity", "full"))
    assert "recompute_method" in found["--train-backend"]


def test_recompute_flags_pass(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = line("--recompute-granularity", "full", "--recompute-method", "uniform")
    args = in_a_trainer([*argv, "--recompute-num-layers", "1"], monkeypatch)
    assert (args.recompute_granularity, args.recompute_num_layers) == ("full", 1)


def test_a_yaml_file_may_hold_megatrons_flags_and_the_command_line_wins(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "tensor_model_parallel_size: 2\nsequence-parallel: true\noverlap-grad-reduce: false\n"
        "recompute-modules: [core_attn, mlp]\ninitial_loss_scale: 1024\n"
    )
    argv = line("--config", str(file), "--initial-loss-scale", "2048")
    args = in_a_trainer(argv, monkeypatch)
    assert args.tensor_model_parallel_size == 2
    assert args.sequence_parallel
    assert not args.overlap_grad_reduce
    assert args.recompute_modules == ["core_attn", "mlp"]
    assert args.initial_loss_scale == 2048


def test_a_value_may_be_negative_or_begin_with_dashes(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = in_a_trainer(line("--activation-func-clamp-value", "-1.5"), monkeypatch)
    assert args.activation_func_clamp_value == -1.5
    args = in_a_trainer(line("--activation-func-clamp-value=-2"), monkeypatch)
    assert args.activation_func_clamp_value == -2


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


def test_a_refusal_in_a_trainer_process_is_a_config_error(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="world size"):
        in_a_trainer(line("--pipeline-model-parallel-size", "2"), monkeypatch, world_size=3)


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
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
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


@pytest.mark.parametrize("words", [("nowhere.at_all", "spec"), ("os.path", "nothing"), ("os",)])
def test_a_spec_that_cannot_be_imported_is_refused(line: Line, words: tuple[str, ...]) -> None:
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


def test_the_parser_has_each_flag_once() -> None:
    parser = namespace.make_parser()
    dests = [option for action in parser._actions for option in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    assert len(dests) == len(set(dests))
