"""Arguments and YAML files to one config."""

from pathlib import Path

import pytest

from miles.config.command_line import CommandLine, Foreign, read_command_line, unknown_flag
from miles.config.flags import flag_specs
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.root import MilesConfig
from miles.config.synonyms import SYNONYMS


def from_file(tmp_path: Path, text: str, *argv: str) -> CommandLine:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read_command_line(["--config", str(path), *argv])


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    line = from_file(tmp_path, "lr: 1e-5\nmin_lr: 0.5\n", "--lr", "3e-5")
    assert line.config.optimizer.lr == 3e-5
    assert line.config.optimizer.min_lr == 0.5
    assert line.config.optimizer.adam_beta1 == 0.9
    assert line.given == {"lr", "min_lr"}
    assert not line.problems


def test_the_place_of_config_on_the_command_line_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    assert read_command_line(["--seed", "2", f"--config={path}"]).config.algorithm.seed == 2


def test_keys_may_be_kebab_or_snake_and_values_of_every_kind(tmp_path: Path) -> None:
    line = from_file(
        tmp_path,
        """
rollout-stop: ["---", "User:"]
rollout_stop_token_ids: [1, -2]
train_env_vars: {A: "1", B: "x"}
wandb-run-id: 123
save: null
advantage_estimator: gspo
offload_train: false
colocate: true
""",
    )
    config = line.config
    assert config.rollout.rollout_stop == ("---", "User:")
    assert config.rollout.rollout_stop_token_ids == (1, -2)
    assert config.cluster.train_env_vars == {"A": "1", "B": "x"}
    assert config.observability.wandb_run_id == "123"
    assert config.checkpoint.save is None
    assert config.algorithm.advantage_estimator == "gspo"
    assert config.offload.offload_train is False
    assert config.cluster.colocate is True
    assert not line.problems
    assert not line.foreign
    assert "save" not in line.given


@pytest.mark.parametrize(
    "text", ["rewards_normalization: false", "disable-rewards-normalization: true"]
)
def test_a_switch_that_is_on_by_default_can_be_switched_off(tmp_path: Path, text: str) -> None:
    assert from_file(tmp_path, text).config.algorithm.rewards_normalization is False
    overruled = from_file(tmp_path, text, "--rewards-normalization")
    assert overruled.config.algorithm.rewards_normalization is True
    argv = ["--disable-rewards-normalization", "--no-keep-fp32-master"]
    config = read_command_line(argv).config
    assert config.algorithm.rewards_normalization is False
    assert config.fsdp.keep_fp32_master is False


def test_the_command_line_switches_off_what_the_file_switched_on(tmp_path: Path) -> None:
    assert from_file(tmp_path, "colocate: yes").config.cluster.colocate is True
    assert from_file(tmp_path, "colocate: yes", "--no-colocate").config.cluster.colocate is False


def test_an_unknown_key_names_the_file_and_the_nearest_flag(tmp_path: Path) -> None:
    line = from_file(tmp_path, "rollout_batch_sise: 3\n")
    (foreign,) = line.foreign
    text = str(unknown_flag(foreign))
    assert text.startswith("--rollout-batch-sise = '3': unknown flag in ")
    assert "run.yaml; did you mean --rollout-batch-size" in text


@pytest.mark.parametrize(
    ("text", "flag", "says"),
    [
        ("lr: fast", "--lr", "must be a number (in "),
        ("seed: true", "--seed", "not true or false"),
        ("colocate: 1", "--colocate", "true or false"),
        ("use-distributed-optimizer: no", "--use-distributed-optimizer", "always on"),
        ("lr: [1, 2]", "--lr", "one value, not a list"),
        ("seed: 1\nrollout-seed: 2\nrollout_seed: 3", "--rollout-seed", "the same flag as"),
        ("offload-train: true\nno-offload-train: true", "--no-offload-train", "the same flag"),
        ("rollout_stop: {a: b}", "--rollout-stop", "a list, not a mapping"),
        ("eval_prompt_data: {a: b}", "--eval-prompt-data", "a list, not a mapping"),
        ("rollout_stop: [x, {a: b}]", "--rollout-stop", "one value, not a mapping"),
        ("save: {a: b}", "--save", "one value, not a mapping"),
        ('save: "a\\0b"', "--save", "null character"),
        ("config: other.yaml", "--config", "has no place in a file"),
        ("--lr: 1.0e-6", "--lr", "is written 'lr' in a file"),
        ("train_env_vars: {when: 2024-01-01}", "--train-env-vars", "not JSON serializable"),
    ],
)
def test_a_bad_value_in_a_file_names_flag_and_file(
    tmp_path: Path, text: str, flag: str, says: str
) -> None:
    (problem,) = from_file(tmp_path, text).problems
    assert problem.flag == flag
    assert says in problem.remedy
    assert "run.yaml" in problem.remedy


@pytest.mark.parametrize(
    ("text", "flag", "written", "says"),
    [
        ("run-dir: 2024-13-01", "--run-dir", "2024-13-01", "is no timestamp (month must be in 1"),
        ("seed: !!int abc", "--seed", "abc", "is no int (invalid literal"),
        ("seed: 010", "--seed", "010", "YAML reads it as the number 8; write a number in decimal"),
        ("seed: 12:30", "--seed", "12:30", "YAML reads it as the number 750; write a number"),
        ("lr: 1:30.5", "--lr", "1:30.5", "YAML reads it as the number 90.5"),
        ("run_dir: -0_17", "--run-dir", "-0_17", "YAML reads it as the number -15"),
        ("rollout_stop: [a, 010]", "--rollout-stop", "010", "the number 8"),
        ("train_env_vars: {A: 12:30:00}", "--train-env-vars", "12:30:00", "the number 45000"),
    ],
)
def test_a_value_that_is_not_read_as_it_is_written_names_flag_file_and_line(
    tmp_path: Path, text: str, flag: str, written: str, says: str
) -> None:
    line = from_file(tmp_path, f"# run\nmin-lr: 0.5\n{text}\n")
    (problem,) = line.problems
    assert (problem.flag, problem.value) == (flag, written)
    assert says in problem.remedy
    assert problem.remedy.endswith("run.yaml, line 3)")
    assert line.whole
    assert line.given == {"min_lr"}


@pytest.mark.parametrize(
    ("text", "seed"), [("7", 7), ("0", 0), ("007", 7), ("1_000", 1000), ("0x10", 16), ("'010'", 10)]
)
def test_numbers_that_mean_what_they_look_like_are_read(
    tmp_path: Path, text: str, seed: int
) -> None:
    line = from_file(tmp_path, f"seed: {text}\n")
    assert not line.problems
    assert line.config.algorithm.seed == seed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [", "is not YAML"),
        (b"a: " + b"[" * 1000 + b"]" * 1000, "is not YAML"),
        (b"- a", "must hold a mapping"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    line = read_command_line(["--config", str(path), "--lr", "fast"])
    assert not line.whole
    broken, value = line.problems
    assert broken.flag == "--config"
    assert says in broken.remedy
    assert value.flag == "--lr"


def test_a_missing_file_is_refused() -> None:
    line = read_command_line(["--config", "nowhere.yaml"])
    assert not line.whole
    (problem,) = line.problems
    assert str(problem).startswith("--config = 'nowhere.yaml': cannot be read")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert not from_file(tmp_path, "# nothing\n").given


def test_all_unknown_flags_come_with_their_words() -> None:
    line = read_command_line(["--foo", "1", "2", "--lr", "3", "--bar=x", "--baz"])
    assert [(f.name, f.value) for f in line.foreign] == [
        ("--foo", "1 2"),
        ("--bar", "x"),
        ("--baz", ""),
    ]
    assert line.config.optimizer.lr == 3.0


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate", "--lr"),
        ("--leraning-rate", "--lr"),
        ("--model", "--hf-checkpoint"),
        ("--num-epochs", "--num-epoch"),
        ("--temperature", "--rollout-temperature"),
        ("--max-new-tokens", "--rollout-max-response-len"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--use-tensorboard", "--tensorboard-dir"),
        ("--debug-train-only", "--load-debug-rollout-data"),
    ],
)
def test_the_names_of_other_programs_lead_to_ours(word: str, flag: str) -> None:
    assert f"did you mean {flag}" in unknown_flag(Foreign(name=word)).remedy


def test_synonyms_are_no_flags_and_stand_for_flags() -> None:
    ours = {option for spec in flag_specs(MilesConfig) for option in spec.options}
    assert set(SYNONYMS.values()) <= ours
    assert ours.isdisjoint(SYNONYMS)
    assert MEGATRON_FLAGS.isdisjoint(word.removeprefix("--") for word in SYNONYMS)


def test_a_stray_word_is_not_swallowed() -> None:
    (foreign,) = read_command_line(["--lr", "1e-6", "1e-5"]).foreign
    assert foreign.name == "1e-5"
    assert "belongs to no flag" in unknown_flag(foreign).remedy


@pytest.mark.parametrize(
    "argv", [["--use-kl-loss=false"], ["--use-kl-loss", "false"], ["--no-use-kl-loss", "false"]]
)
def test_a_switch_with_a_value_is_told_its_opposite(argv: list[str]) -> None:
    """Whoever writes ``false`` must not be told to write the switch alone, which is true."""
    line = read_command_line([*argv, "--seed", "7"])
    (problem,) = line.problems
    assert (problem.flag, problem.value) == (argv[0].partition("=")[0], "false")
    assert "--use-kl-loss switches it on, --no-use-kl-loss switches it off" in problem.remedy
    assert not line.foreign
    assert line.config.algorithm.seed == 7


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-sglang"])
def test_help_with_a_value_hides_no_other_problem(flag: str) -> None:
    line = read_command_line([f"{flag}=lr", "--seed", "x"])
    assert [p.flag for p in line.problems] == [flag, "--seed"]


def test_flags_are_not_abbreviated() -> None:
    line = read_command_line(["--rollout-batch", "8"])
    assert line.config.data.rollout_batch_size is None
    assert "did you mean --rollout-batch-size" in unknown_flag(line.foreign[0]).remedy


def test_what_argparse_would_stop_at_becomes_problems() -> None:
    argv = ["--lr", "--colocate=true", "--min-lr", "--", "--seed", "x", "--rollout-stop"]
    line = read_command_line(argv)
    assert [p.flag for p in line.problems] == [
        "--lr",
        "--colocate",
        "--min-lr",
        "--",
        "--rollout-stop",
        "--seed",
    ]


def test_negative_numbers_are_values() -> None:
    line = read_command_line(["--lr", "-1e-5", "--rollout-top-k", "-1", "--rm-default", "-.5"])
    assert line.config.optimizer.lr == -1e-5
    assert line.config.rollout.rollout_top_k == -1
    assert line.config.reward.rm_default == -0.5
    assert not line.foreign


def test_a_value_that_begins_with_dashes_is_joined_by_an_equals_sign() -> None:
    assert read_command_line(["--rollout-stop=---"]).config.rollout.rollout_stop == ("---",)


def test_the_last_of_a_repeated_flag_wins() -> None:
    assert read_command_line(["--seed", "1", "--seed", "2"]).config.algorithm.seed == 2


def test_no_flag_given_gives_the_defaults() -> None:
    line = read_command_line([])
    assert line.config == type(line.config)()
    assert line.given == frozenset()


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    line = from_file(tmp_path, "lr: 1.0\nlr: 2.0\n")
    (problem,) = line.problems
    assert problem.flag == "--lr"
    assert "more than once" in problem.remedy


def test_an_object_in_a_file_reaches_whoever_knows_the_flag_as_json(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('sglang-json-model-override-args: {"rope": {"factor": 2.0}, "x": null}\n')
    (flag,) = read_command_line(["--config", str(path)]).foreign
    assert flag.words == ('{"rope": {"factor": 2.0}, "x": null}',)


@pytest.mark.parametrize("name", ["help", "help-sglang", "help-router"])
def test_help_is_nothing_for_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{name}: true\n")
    (problem,) = read_command_line(["--config", str(path)]).problems
    assert "has no place in a file" in problem.remedy


def test_a_number_of_thousands_of_digits_hides_no_other_problem() -> None:
    line = read_command_line(["--num-rollout", "7" * 5000, "--lr", "fast"])
    assert {problem.flag for problem in line.problems} == {"--num-rollout", "--lr"}
    assert max(len(str(problem)) for problem in line.problems) < 600
