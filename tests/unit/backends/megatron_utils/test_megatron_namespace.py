"""Megatron's namespace in a trainer process."""

from pathlib import Path

import pytest

from miles.backends.megatron_utils import machine, namespace, package
from miles.config.derived import token_budget
from miles.config.errors import ConfigError
from miles.utils.arguments import read_config
from tests.unit.backends.megatron_utils.made_lines import Line, in_a_trainer, problems


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
    argv = line("--context-parallel-size", "2", "--use-dynamic-batch-size")
    argv += ["--max-tokens-per-gpu", "100", "--rollout-max-response-len", "150"]
    args = in_a_trainer(argv, monkeypatch)
    assert (args.context_parallel_size, args.data_parallel_size) == (2, 1)
    assert token_budget(read_config(argv)[0]) == 200
    long = problems([*argv, "--rollout-max-response-len", "250"])
    assert "its 2 GPUs (--context-parallel-size 2" in long.popitem()[1]


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
        "recompute-granularity: selective\nrecompute-modules: [core_attn, mlp]\n"
        "initial_loss_scale: 1024\n"
    )
    argv = line("--config", str(file), "--initial-loss-scale", "2048", "--fp16")
    args = in_a_trainer(argv, monkeypatch)
    assert args.tensor_model_parallel_size == 2
    assert args.sequence_parallel
    assert not args.overlap_grad_reduce
    assert args.recompute_modules == ["core_attn", "mlp"]
    assert args.initial_loss_scale == 2048


def test_the_loss_scale_of_fp16_starts_where_the_first_steps_are_taken(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_a_trainer(line("--fp16"), monkeypatch).initial_loss_scale == 65536
    explicit = line("--fp16", "--initial-loss-scale", str(2**32))
    assert in_a_trainer(explicit, monkeypatch).initial_loss_scale == 2**32
    assert in_a_trainer(line("--fp16", "--loss-scale", "128"), monkeypatch).loss_scale == 128


def test_a_value_may_be_negative_or_begin_with_dashes(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = in_a_trainer(line("--activation-func-clamp-value", "-1.5"), monkeypatch)
    assert args.activation_func_clamp_value == -1.5
    args = in_a_trainer(line("--activation-func-clamp-value=-2"), monkeypatch)
    assert args.activation_func_clamp_value == -2


def test_a_refusal_in_a_trainer_process_is_a_config_error(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="world size"):
        in_a_trainer(line("--pipeline-model-parallel-size", "2"), monkeypatch, world_size=3)


def test_the_parser_has_each_flag_once() -> None:
    parser = namespace.make_parser()
    dests = [option for action in parser._actions for option in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    assert len(dests) == len(set(dests))
