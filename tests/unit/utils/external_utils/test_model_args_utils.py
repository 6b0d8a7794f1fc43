"""The architecture lines that ship, against the public configs; the tool run by its path."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from miles.backends.megatron_utils.architecture import (
    ARCHITECTURE_FLAGS,
    FAMILIES,
    flags_of,
    to_argv,
)
from miles.utils.external_utils import model_args_utils
from tests.unit.scripts.public_models import PUBLIC

ROOT = Path(__file__).parents[4]


def test_every_shipped_model_has_its_public_config_here() -> None:
    assert set(model_args_utils.names()) == set(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_shipped_line_is_the_one_derived_from_the_public_config(name: str) -> None:
    fields = dict(PUBLIC[name])
    derived = flags_of(AutoConfig.for_model(fields.pop("model_type"), **fields))
    shipped = runpy.run_path(str(ROOT / f"scripts/models/{name}.py"))["MODEL_ARGS"]
    assert to_argv(shipped) == to_argv(derived)


def test_every_family_that_converts_ships_a_size() -> None:
    families = {fields["model_type"] for fields in PUBLIC.values()}
    assert families == {name for name in FAMILIES if not name.endswith("_text")}


def test_lines_hold_architecture_flags_only_and_survive_a_shells_splitting() -> None:
    for name in model_args_utils.names():
        line = " ".join(model_args_utils.model_args(name))
        flags = {word.removeprefix("--") for word in line.split() if word.startswith("--")}
        assert flags - {"spec"} <= ARCHITECTURE_FLAGS
        assert not set("'\"\\$*?") & set(line)


def run(*arguments: str, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """By path and from elsewhere, as the recipes do."""
    script = ROOT / "miles/utils/external_utils/model_args_utils.py"
    return subprocess.run(
        [sys.executable, *options, str(script), *arguments],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_name_prints_one_line_without_any_package_installed() -> None:
    result = run("qwen3-4B", options=("-S",))
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.startswith("--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 ")
    assert line.split().count("--qk-layernorm") == 1


def test_a_directory_prints_the_line_of_its_config(tiny_qwen3: Path) -> None:
    result = run(str(tiny_qwen3))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 ")
    assert len(result.stdout.splitlines()) == 1


def test_a_directory_of_an_architecture_that_a_plugin_brings_prints_its_spec_too(
    tmp_path: Path,
) -> None:
    config = AutoConfig.for_model(
        "phi3", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    config.save_pretrained(tmp_path)
    result = run(str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "--spec miles_plugins.models.phi3 get_phi3_spec --num-layers 2 --hidden-size 64 "
    )


def test_a_directory_of_an_unknown_architecture_names_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = run(str(tmp_path))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "'gpt2' has no conversion" in result.stderr


def test_an_unknown_name_lists_the_names_and_prints_no_line() -> None:
    result = run("qwen3-4b", options=("-S",))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "did you mean qwen3-4B?" in result.stderr
    assert all(name in result.stderr for name in model_args_utils.names())


def test_without_a_name_the_names_are_listed() -> None:
    result = run(options=("-S",))
    assert result.returncode == 2
    assert "qwen3-30B-A3B" in result.stderr
