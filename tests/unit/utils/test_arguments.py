"""The composition root: one command line, all problems."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles.backends.sglang_utils import package
from miles.backends.training_utils import checkpoints
from miles.config.checkpoint import CheckpointConfig
from miles.config.errors import ConfigError
from miles.config.record import write_record
from miles.config.root import MilesConfig
from miles.rollout.debug_data import save_groups
from miles.utils.arguments import get_miles_extra_args_provider, parse_args, read_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a checkpoint; its contents are not read by the checks."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def valid(tmp_path: Path, model: Path) -> list[str]:
    prompts = tmp_path / "train.jsonl"
    prompts.write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")
    return [
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", "2", "--fp32"),
        *("--hf-checkpoint", str(model), "--prompt-data", f"{prompts}@[0:1]"),
        *("--label-key", "label", "--rm-type", "math"),
        *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "8", "--rollout-num-gpus", "1"),
    ]


def flags_of(argv: list[str]) -> set[str]:
    with pytest.raises(ConfigError) as error:
        read_config(argv)
    return {problem.flag for problem in error.value.problems}


def test_a_valid_command_line_is_a_frozen_resolved_config(valid: list[str]) -> None:
    config = parse_args(valid)
    assert config.data.global_batch_size == 8
    assert config.cluster.num_train_ranks == 2
    assert config.offload.offload_train is False


def test_reconciled_flags_are_said(valid: list[str]) -> None:
    config, messages = read_config([*valid, "--colocate", "--rollout-num-gpus", "7"])
    assert config.cluster.rollout_num_gpus == 2
    (message,) = [m for m in messages if m.text.startswith("--rollout-num-gpus: 7 becomes 2")]
    assert message.level == logging.WARNING


def test_all_problems_of_a_command_line_are_reported_in_one_go(
    valid: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    config_file = tmp_path / "run.yaml"
    config_file.write_text("rollout_batch: 8\nmin_lr: x\n")
    argv = [
        *valid,
        *("--config", str(config_file), "--seed", "1.5", "--lr"),
        *("--rollout-temperature", "0", "--save-interval", "1", "--tis-clip", "2"),
        *("--tensor-model-parallel-size", "2", "--lora-rank", "8", "--context-parallel-size", "2"),
        *("--dp-replicate-size", "3", "--rollout-batch-sise", "4", "--rollout-engine", "sglang"),
        *("--ref-load", str(tmp_path), "--use-kl-loss", "--chat-template-path", "no.jinja"),
        *("--apply-chat-template", "--data-source-path", "nowhere.Source"),
        *("--eval-prompt-data", "held-out", "no.jsonl"),
    ]
    expected = {
        "--seed",
        "--lr",
        "--min-lr",
        "--rollout-batch",
        "--rollout-batch-sise",
        "--rollout-temperature",
        "--save-interval",
        "--tis-clip",
        "--tensor-model-parallel-size",
        "--lora-rank",
        "--context-parallel-size",
        "--dp-replicate-size",
        "--rollout-engine",
        "--ref-load",
        "--chat-template-path",
        "--data-source-path",
        "--eval-prompt-data",
        "--eval-interval",
    }
    assert flags_of(argv) == expected
    with pytest.raises(SystemExit) as stop:
        parse_args(argv)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert f"{len(expected)} problems:" in text
    shown = {line.strip().partition(" = ")[0].partition(": ")[0] for line in text.splitlines()}
    assert expected <= shown


def test_flags_of_engine_and_router_are_refused_where_the_engine_has_none(
    valid: list[str],
) -> None:
    argv = [*valid, "--rollout-engine", "embedded", "--sglang-page-size", "16", "--router-policy"]
    assert flags_of(argv) == {"--sglang-page-size", "--router-policy"}


@pytest.mark.sglang
def test_flags_of_engine_and_router_are_in_the_config(
    valid: list[str], tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "has_accelerator", lambda: True)
    argv = ["--rollout-engine", "sglang", "--sglang-page-size", "16", "--router-policy", "random"]
    config, _ = read_config([*valid, "--hf-checkpoint", str(tiny_qwen3), *argv])
    assert config.sglang_argv == ("--page-size", "16")
    assert config.router_argv == ("--policy", "random")


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--help-sglang", "--sglang-enable-dp-attention"),
        ("--help-router", "--router-balance-abs-threshold"),
    ],
)
def test_the_flags_that_pass_through_are_listed(
    capsys: pytest.CaptureFixture[str], flag: str, line: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args([flag])
    assert stop.value.code == 0
    assert line in capsys.readouterr().out


def test_a_value_that_cannot_be_read_has_no_second_problem(valid: list[str]) -> None:
    assert flags_of([*valid, "--num-rollout", "many"]) == {"--num-rollout"}


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_refused(valid: list[str], model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=r"--hf-checkpoint = .* has no "):
        read_config(valid)


def test_a_command_line_is_checked_without_torch(valid: list[str]) -> None:
    code = (
        "import sys\n"
        "from miles.utils.arguments import read_config\n"
        f"read_config({valid!r})\n"
        "heavy = {'torch', 'transformers', 'ray', 'pyarrow', 'reasoning_gym'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_model_type_that_nothing_can_load_is_refused(valid: list[str], model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "qwen33"}')
    with pytest.raises(ConfigError, match=r"--hf-checkpoint = .*'qwen33'"):
        read_config(valid)


def test_a_model_that_is_no_causal_language_model_is_refused_without_torch(
    valid: list[str], model: Path
) -> None:
    (model / "config.json").write_text('{"model_type": "t5", "d_model": 32, "vocab_size": 64}')
    code = (
        "import sys\n"
        "from miles.utils.arguments import read_config\n"
        "from miles.config.errors import ConfigError\n"
        "for runs_here in (True, False):\n"
        "    try:\n"
        f"        read_config({valid!r}, runs_here=runs_here)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or '') or 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "'t5'" in line]
    assert len(lines) == 2
    assert all("--hf-checkpoint = " in line and "give one" in line for line in lines)


def test_who_loads_no_causal_language_model_may_be_given_another(
    valid: list[str], model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "config.json").write_text('{"model_type": "t5"}')
    assert flags_of([*valid, "--ref-load", str(other), "--use-kl-loss"]) == {"--ref-load"}
    shutil.copy(other / "config.json", model)
    read_config([*valid, "--debug-rollout-only"])
    embedded = ["--debug-rollout-only", "--rollout-engine", "embedded"]
    assert flags_of([*valid, *embedded]) == {"--hf-checkpoint"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rollout-max-context-len", "65"), "--rollout-max-context-len"),
        (("--rollout-max-prompt-len", "64"), "--rollout-max-prompt-len"),
        (("--rollout-max-response-len", "65"), "--rollout-max-response-len"),
    ],
)
def test_lengths_that_the_model_does_not_have_are_refused(
    valid: list[str], flags: tuple[str, str], named: str
) -> None:
    assert flags_of([*valid, *flags]) == {named}
    shorter = str(int(flags[1]) - 1)
    read_config([*valid, flags[0], shorter])


def test_token_ids_that_the_model_does_not_have_are_refused(valid: list[str]) -> None:
    model = Path(valid[valid.index("--hf-checkpoint") + 1])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 32}))
    ids = [*valid, "--rollout-stop-token-ids", "31"]
    read_config(ids)
    assert flags_of([*ids, "32"]) == {"--rollout-stop-token-ids"}


def test_only_sglang_serves_beyond_the_models_positions(valid: list[str]) -> None:
    beyond = [*valid, "--sglang-context-length", "65"]
    assert flags_of([*beyond, "--rollout-engine", "embedded"]) == {"--sglang-context-length"}
    read_config(beyond)


def test_a_first_recorded_rollout_that_is_not_there_is_refused(
    valid: list[str], tmp_path: Path
) -> None:
    template = str(tmp_path / "r{rollout_id}")
    debug = [*valid, "--load-debug-rollout-data", template]
    assert flags_of(debug) == {"--load-debug-rollout-data"}
    save_groups(template, 0, [])
    read_config(debug)
    # The rollout that the run starts with, or goes on with.
    late = ["--num-rollout", "9", "--start-rollout-id", "1"]
    assert flags_of([*debug, *late]) == {"--load-debug-rollout-data"}
    checkpoint = str(made_checkpoint(tmp_path / "ckpt", "fsdp"))
    resumed = [*debug, "--num-rollout", "9", "--load", checkpoint]
    assert flags_of(resumed) == {"--load-debug-rollout-data"}
    save_groups(template, 3, [])
    read_config(resumed)


def test_a_missing_prompt_file_and_a_bad_slice_are_refused(valid: list[str]) -> None:
    assert flags_of([*valid, "--prompt-data", "nowhere.jsonl"]) == {"--prompt-data"}
    assert flags_of([*valid, "--prompt-data", "train.jsonl@[a:b]"]) == {"--prompt-data"}


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt-data", "{place}.jsonl"),
        ("--eval-prompt-data", "held-out", "{place}.jsonl", "--eval-interval", "1"),
        ("--hf-checkpoint", "{place}"),
        ("--ref-load", "{place}", "--use-kl-loss"),
        ("--load", "{place}"),
        ("--load-debug-rollout-data", "{place}-{{rollout_id}}"),
        ("--save-hf", "{place}", "--save", "ckpt"),
    ],
)
def test_a_place_that_cannot_be_asked_for_is_refused_and_hides_nothing(
    valid: list[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Without permission it is the same, which a test as root cannot show."""
    place = tmp_path / ("a" * 300)
    given = [word.format(place=place) for word in flags]
    assert flags_of([*valid, *given, "--clip-grad", "-1"]) == {flags[0], "--clip-grad"}


def test_a_prompt_file_that_cannot_be_read_is_refused(valid: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"--prompt-data = .*\n.*Input/output error"):
        read_config([*valid, "--prompt-data", str(tmp_path / "broken.jsonl")])


def test_a_sentinel_without_save_is_refused(valid: list[str]) -> None:
    with pytest.raises(
        ConfigError, match="--save-trigger-sentinel = 'f': applies only with --save"
    ):
        read_config([*valid, "--save-trigger-sentinel", "f"])


def test_a_step_directory_instead_of_its_parent_is_refused_with_the_parent(
    valid: list[str], tmp_path: Path
) -> None:
    step = tmp_path / "ckpt" / "iter_0000003"
    step.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"--load = .*{tmp_path / 'ckpt'}") as error:
        read_config([*valid, "--load", str(step)])
    assert [problem.flag for problem in error.value.problems] == ["--load"]


def test_loading_from_where_nothing_is_yet_is_a_fresh_start(
    valid: list[str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "new")
    config, _ = read_config([*valid, "--load", folder, "--save", folder])
    assert config.checkpoint.load == folder
    assert config.data.start_rollout_id is None


@pytest.fixture
def megatron(valid: list[str], tiny_qwen3: Path) -> list[str]:
    """The same for the other backend, which reads the model's ``config.json``."""
    pytest.importorskip("megatron.training")
    return [*valid, "--train-backend", "megatron", "--hf-checkpoint", str(tiny_qwen3)]


@pytest.mark.megatron
def test_megatrons_arguments_are_part_of_the_config(megatron: list[str]) -> None:
    config, _ = read_config([*megatron, "--overlap-grad-reduce"])
    assert "--overlap-grad-reduce" in config.megatron_argv
    assert "--num-layers" in config.megatron_argv
    assert config.precision.fp32


@pytest.mark.megatron
def test_flags_of_fsdp_are_refused_under_megatron(megatron: list[str]) -> None:
    assert flags_of([*megatron, "--gradient-checkpointing"]) == {"--gradient-checkpointing"}


def test_flags_of_megatron_are_refused_under_fsdp(valid: list[str]) -> None:
    argv = [*valid, "--custom-megatron-init-path", "os.getpid", "--num-layers", "2"]
    assert flags_of(argv) == {"--custom-megatron-init-path", "--num-layers"}


def made_checkpoint(
    folder: Path, backend: str = "megatron", model: Mapping[str, str | int] | None = None
) -> Path:
    """A step that is complete as far as a check without tensors can see."""
    checkpoints.prepare_staging(folder, 3, ("part",))
    (checkpoints.staging_dir(folder, 3) / "part").write_text("tensors")
    described = {} if model is None else {checkpoints.MODEL: model}
    checkpoints.publish(folder, 3, {"backend": backend, **described})
    return folder


@pytest.mark.megatron
def test_megatron_starts_from_a_checkpoint_given_as_the_reference(
    megatron: list[str], tmp_path: Path
) -> None:
    folder = str(made_checkpoint(tmp_path / "converted"))
    config, _ = read_config([*megatron, "--ref-load", folder])
    assert config.algorithm.ref_load == folder
    config, _ = read_config([*megatron, "--ref-load", folder, "--use-kl-loss"])
    assert config.algorithm.ref_load == folder


@pytest.mark.megatron
def test_a_reference_that_nothing_reads_is_refused(
    megatron: list[str], valid: list[str], tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Weights come from --hf-checkpoint; a Hugging Face reference is only for KL."""
    assert flags_of([*megatron, "--ref-load", str(tiny_qwen3)]) == {"--ref-load"}
    config, _ = read_config([*megatron, "--ref-load", str(tiny_qwen3), "--use-kl-loss"])
    assert config.algorithm.ref_load == str(tiny_qwen3)
    folder = made_checkpoint(tmp_path / "converted")
    assert flags_of([*valid, "--ref-load", str(folder), "--use-kl-loss"]) == {"--ref-load"}


@pytest.mark.megatron
def test_a_reference_at_a_step_or_with_a_missing_file_is_refused(
    megatron: list[str], tmp_path: Path
) -> None:
    folder = made_checkpoint(tmp_path / "converted")
    step = folder / "iter_0000003"
    with pytest.raises(ConfigError, match=f"--ref-load = .*{folder}"):
        read_config([*megatron, "--ref-load", str(step)])
    (step / "part").unlink()
    with pytest.raises(ConfigError, match=r"--ref-load = .*part is missing"):
        read_config([*megatron, "--ref-load", str(folder)])
    with pytest.raises(ConfigError) as nowhere:
        read_config([*megatron, "--ref-load", str(tmp_path / "nowhere")])
    (problem,) = nowhere.value.problems
    assert problem.flag == "--ref-load"
    assert "not a directory" in problem.remedy


@pytest.mark.megatron
def test_a_checkpoint_given_as_the_model_says_which_flag_takes_it(
    megatron: list[str], tmp_path: Path
) -> None:
    folder = str(made_checkpoint(tmp_path / "converted"))
    with pytest.raises(ConfigError, match=r"--hf-checkpoint = .*--load of that backend takes"):
        read_config([*megatron, "--hf-checkpoint", folder])


def test_an_engine_that_is_not_installed_is_refused_with_the_way_out(
    valid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="--rollout-engine embedded"):
        read_config([*valid, "--rollout-engine", "sglang"])


def test_the_provider_adds_every_flag_to_a_parser_of_someone_else() -> None:
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float, default=None)
    same = get_miles_extra_args_provider()(parser)
    assert same is parser
    namespace = parser.parse_args(["--rollout-batch-size", "4"])
    assert namespace.lr == 1e-6
    assert namespace.rollout_batch_size == 4
    assert namespace.n_samples_per_prompt == 1


def test_a_checkpoint_of_the_other_backend_is_refused(valid: list[str], tmp_path: Path) -> None:
    checkpoint = str(made_checkpoint(tmp_path / "ckpt"))
    with pytest.raises(ConfigError, match=r"--load = .*written by the megatron backend"):
        read_config([*valid, "--load", checkpoint])


def test_a_checkpoint_of_another_model_is_refused_however_many_rollouts_are_left(
    valid: list[str], model: Path, tmp_path: Path
) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 64, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    checkpoint = str(made_checkpoint(tmp_path / "ckpt", "fsdp", checkpoints.model_of(str(model))))
    argv = [*valid, "--load", checkpoint]
    read_config(argv)
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    says = r"--load = .*hidden_size 64 instead of 128.*give the --hf-checkpoint"
    for num_rollout in ("2", "3", "9"):
        with pytest.raises(ConfigError, match=says):
            read_config([*argv, "--num-rollout", num_rollout])


@pytest.mark.megatron
def test_a_reference_of_another_model_is_refused(megatron: list[str], tmp_path: Path) -> None:
    folder = str(made_checkpoint(tmp_path / "converted", model={"hidden_size": 4096}))
    with pytest.raises(ConfigError, match=r"--ref-load = .*hidden_size 4096 instead of "):
        read_config([*megatron, "--ref-load", folder])


@pytest.mark.parametrize(
    "flag", ["--save-hf", "--save-debug-rollout-data", "--save-trigger-sentinel"]
)
def test_a_file_that_is_to_be_written_below_another_file_is_refused(
    valid: list[str], tmp_path: Path, flag: str
) -> None:
    (tmp_path / "file").touch()
    argv = [*valid, "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    path = str(tmp_path / "file" / "x-{rollout_id}")
    assert flags_of([*argv, flag, path]) == {flag}


def test_checkpoints_are_not_saved_into_a_model(valid: list[str], model: Path) -> None:
    assert flags_of([*valid, "--save", str(model)]) == {"--save"}


def run_directory(folder: Path, save: str | None) -> Path:
    """As a run leaves it."""
    folder.mkdir()
    write_record(folder, MilesConfig(checkpoint=CheckpointConfig(save=save)))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


@pytest.mark.parametrize(
    ("save", "told"), [(None, "saved no checkpoints"), ("/runs/a/ckpt", "are in '/runs/a/ckpt'")]
)
@pytest.mark.parametrize("flag", ["--load", "--save"])
def test_a_run_directory_in_the_place_of_checkpoints_is_refused_for_what_it_is(
    valid: list[str], tmp_path: Path, flag: str, save: str | None, told: str
) -> None:
    folder = run_directory(tmp_path / "run", save)
    with pytest.raises(ConfigError) as error:
        read_config([*valid, flag, str(folder)])
    (problem,) = error.value.problems
    assert problem.flag == flag
    assert "is the run directory of a run" in problem.remedy
    assert told in problem.remedy
    assert "Hugging Face" not in problem.remedy


def test_a_run_whose_records_lie_beside_its_checkpoints_still_goes_on(
    valid: list[str], tmp_path: Path
) -> None:
    folder = run_directory(tmp_path / "run", str(tmp_path / "run"))
    checkpoints.prepare_staging(folder, 1, [])
    checkpoints.publish(folder, 1, {"backend": "fsdp", "config": {}})
    read_config([*valid, "--load", str(folder), "--save", str(folder)])


@pytest.mark.parametrize("name", ["other", "other-{rollout_id}"])
def test_an_export_is_not_to_replace_a_model_that_no_run_wrote(
    valid: list[str], model: Path, tmp_path: Path, name: str
) -> None:
    argv = [*valid, "--save", str(tmp_path / "ckpt"), "--save-hf", str(tmp_path / name)]
    read_config(argv)
    other = tmp_path / name.format(rollout_id=1)
    shutil.copytree(model, other)
    with pytest.raises(ConfigError, match=f"--save-hf = .*{name}.*no export of this program"):
        read_config(argv)


def test_wandb_without_a_login_is_a_problem(
    valid: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert flags_of([*valid, "--use-wandb", "--wandb-mode", "online"]) == {
        "--use-wandb, --wandb-mode"
    }
    read_config([*valid, "--use-wandb", "--wandb-mode", "offline"])


def test_a_file_that_cannot_be_read_hides_no_mistake_of_the_command_line(tmp_path: Path) -> None:
    """And what it may hold is not missed: neither the model nor --use-tis."""
    (tmp_path / "file").touch()
    argv = [
        *("--config", str(tmp_path / "nowhere.yaml"), "--lr", "-1", "--seed", "x"),
        *("--save", str(tmp_path / "file" / "ckpt"), "--rolout-batch-size", "4"),
        *("--tis-clip", "3", "--num-layers", "2"),
    ]
    assert flags_of(argv) == {"--config", "--lr", "--seed", "--save", "--rolout-batch-size"}
