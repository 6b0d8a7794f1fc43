"""FSDP checkpoints to Hugging Face directories by tools/convert_fsdp_to_hf.py."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.backends.fsdp_utils.conversion import fsdp_to_hf
from miles.config.errors import ConfigError
from scripts.made_models import make_qwen3
from tests.ranks import Ranks
from tests.unit.backends.conversion_jobs import on_full_disk
from tests.unit.backends.fsdp_utils.jobs import (
    as_bytes,
    make_config,
    make_rollouts,
    train_rollouts,
)
from tools.convert_fsdp_to_hf import main


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    files = sorted(path.glob("*.safetensors"))
    return {name: as_bytes(t) for file in files for name, t in load_file(file).items()}


@pytest.mark.parametrize("model", ["tiny_qwen3", "tiny_qwen3_moe"])
def test_a_saved_step_becomes_the_directory_of_the_weights_that_it_would_send(
    two_ranks: Ranks,
    request: pytest.FixtureRequest,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path: Path = request.getfixturevalue(model)
    save, exported = tmp_path / "save", tmp_path / "hf"
    config = make_config(path, checkpoint={"save": str(save)})
    (sent, _) = two_ranks.run_well(train_rollouts, config, make_rollouts(config, 1), 0, (0,))
    main(["--load", str(save), "--hf-checkpoint", str(path), "--save", str(exported)])
    assert capsys.readouterr().out.endswith(f"wrote {exported}\n")
    assert stored(exported) == sent["weights"]
    assert stored(exported) != stored(path)
    assert AutoModelForCausalLM.from_pretrained(exported, dtype="auto").config == (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto").config
    )
    assert AutoTokenizer.from_pretrained(exported).eos_token_id == 1

    argv = ["--load", str(save), "--hf-checkpoint", str(path), "--save"]
    monkeypatch.setenv("RANK", "0")
    code, said = on_full_disk(main, [*argv, str(tmp_path / "full")], 50_000)
    assert code == 1
    error = f"error: export to {tmp_path / 'full'}: [Errno 27] File too large; "
    assert re.fullmatch(rf".*: {re.escape(error)}[\d,.]+ MiB are free in {tmp_path}\n", said)
    with pytest.raises(SystemExit, match="2"):
        main([*argv, str(exported)])
    assert f"--save = {str(exported)!r}: is not empty" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [exported, save]

    for name in (".metadata", "__1_0.distcp"):
        file = save / "iter_0000001" / "model" / name
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        target = tmp_path / "damaged"
        with pytest.raises(SystemExit, match="2"):
            main([*argv, str(target)])
        assert f"step 1: {file} is damaged" in capsys.readouterr().err
        assert not list(tmp_path.glob("damaged*"))
        file.write_bytes(whole)

    other = make_qwen3(tmp_path / "other", hidden_size=16)
    with pytest.raises(ConfigError, match="is of another model than --hf-checkpoint"):
        fsdp_to_hf(str(save), str(other), str(tmp_path / "never"))
    # As a step that does not say of which model it is.
    file = save / "iter_0000001" / "metadata.json"
    file.write_text(file.read_text().replace('"model":', '"other":'))
    with pytest.raises(ConfigError, match="is not of the model in"):
        fsdp_to_hf(str(save), str(other), str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()


def test_a_directory_without_checkpoint_is_refused(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--hf-checkpoint", str(tiny_qwen3), "--save", str(tmp_path / "hf")]
    for load, says in ((tmp_path / "none", "does not exist"), (tiny_qwen3, "Hugging Face")):
        with pytest.raises(SystemExit, match="2"):
            main(["--load", str(load), *arguments])
        assert says in capsys.readouterr().err


def test_every_problem_is_told_at_once(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--load", str(tiny_qwen3), "--hf-checkpoint", str(tmp_path / "none"), "--hf-chekpoint"]
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "hf"])
    first, *problems = capsys.readouterr().err.splitlines()
    assert first.endswith(": 4 problems:")
    for problem, says in zip(
        problems,
        (
            "--hf-chekpoint hf: is no argument of this tool",
            f"--hf-checkpoint = {str(tmp_path / 'none')!r}: ",
            f"--load = {str(tiny_qwen3)!r}: is a Hugging Face directory",
            "--save: is required",
        ),
        strict=True,
    ):
        assert problem.startswith(f"  {says}")


def test_an_option_without_its_value_is_one_of_all_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--load", "nowhere", "--save", "--hf-checkpoint", "--loda"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "4 problems" in told
    for flag in ("--load = 'nowhere'", "--save:", "--hf-checkpoint:", "--loda"):
        assert flag in told
