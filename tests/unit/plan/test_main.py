import json
from pathlib import Path

import pytest

from miles.config.flags import flag_specs
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.root import MilesConfig
from miles.plan.__main__ import main, make_parser
from tests.unit.plan.made_jobs import RUN, config_dir


def line(model: Path, *more: str) -> list[str]:
    return [
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", "4", "--colocate"),
        *("--hf-checkpoint", str(model), *RUN, *more),
    ]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return config_dir(tmp_path / "model")


def test_a_directory_with_a_config_alone_is_enough(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(model, "--device-memory-gb", "40")) == 0
    shown = capsys.readouterr().out
    assert "180,864 parameters, fsdp on 4 ranks" in shown
    for phase in ("rollout:", "sync:", "train:"):
        assert phase in shown
    assert "of 40.0 GiB, fits" in shown
    assert "What to turn" not in shown


def test_what_does_not_fit_is_named_with_the_flag_to_turn(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share = ("--sglang-mem-fraction-static", "0.95")
    assert main(line(model, *share, "--device-memory-gb", "20")) == 1
    shown = capsys.readouterr().out
    assert "20.2 of 20.0 GiB, does not fit: 0.2 GiB too much" in shown
    assert "  --sglang-mem-fraction-static 0.7: saves 5.0 GiB of the device, enough alone" in shown


def test_machines_get_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(model, "--json", "--device-memory-gb", "40", "--host-memory-gb", "8")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert (found["device_bytes"], found["host_bytes"]) == (40 * 2**30, 8 * 2**30)
    assert [phase["phase"] for phase in found["phases"]] == ["rollout", "sync", "train"]
    train = found["phases"][-1]
    lines = {entry["component"]: entry for entry in train["lines"]}
    assert lines["parameters"]["device"] == 180_864
    assert lines["copies for sleep"]["host"] == 3 * 180_864
    assert train["sum"]["device"] == sum(entry["device"] for entry in train["lines"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--max-tokens-per-gpu", "many"), "--max-tokens-per-gpu = 'many'"),
        (("--hf-checkpoint", "nowhere"), "'nowhere' is not a directory"),
        (("--tensor-model-parallel-size", "2"), "which the fsdp backend does not have"),
        (("--device-memory-gb", "0"), "--device-memory-gb = '0': must be a number above 0"),
        (("--host-memory-gb", "inf"), "--host-memory-gb = 'inf': must be a number above 0"),
        (("--debug-rollout-only",), "trains nothing"),
    ],
)
def test_bad_flags_end_as_those_of_train_py(
    more: tuple[str, ...], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line(model, *more))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_everything_wrong_is_told_at_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--device-memory-gb", "much", "--host-memory-gb", "--lr", "abc", "--jsn")
    with pytest.raises(SystemExit) as ended:
        main(line(model, *wrong))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "4 problems" in told
    for flag in ("--device-memory-gb = 'much'", "--host-memory-gb", "--lr = 'abc'", "--jsn"):
        assert flag in told


def test_flags_of_sglangs_own_are_said_to_be_unread(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--sglang-chunked-prefill-size", "2048")
    assert main(line(model, *own, "--device-memory-gb", "40")) == 0
    assert "--sglang-chunked-prefill-size" in capsys.readouterr().err


def test_the_planners_flags_are_none_of_a_runs() -> None:
    own = {option for action in make_parser()._actions for option in action.option_strings}
    run = {option for spec in flag_specs(MilesConfig) for option in spec.options}
    run |= {f"--{name}" for name in MEGATRON_FLAGS} | {"--config"}
    assert own - {"-h", "--help"} == {"--device-memory-gb", "--host-memory-gb", "--json"}
    assert own & run == set()
    # argparse must not take a longer flag of a run for one of these.
    assert not any(flag.startswith(("--sglang-", "--router-")) for flag in own)


def test_a_prompt_that_nothing_bounds_is_assumed_and_said(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = line(model, "--device-memory-gb", "40")
    at = argv.index("--rollout-max-prompt-len")
    del argv[at : at + 2]
    assert main(argv) == 0
    assert "prompts are taken to have at most 1,024 tokens" in capsys.readouterr().out
