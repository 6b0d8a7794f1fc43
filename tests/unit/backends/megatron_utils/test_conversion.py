"""tools/convert_*.py as they are run: Hugging Face -> torch_dist -> Hugging Face."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.convert_memory import MIB, both_ways, make_model
from miles.backends.megatron_utils import package
from miles.backends.training_utils.checkpoints import TRACKER
from scripts.made_models import make_qwen3, make_qwen3_5, make_qwen3_moe
from tests.ranks import Ranks
from tests.unit.backends.conversion_jobs import on_full_disk
from tests.unit.backends.fsdp_utils import jobs
from tools.convert_fsdp_to_hf import main as fsdp_to_hf
from tools.convert_hf_to_torch_dist import main as hf_to_torch_dist
from tools.convert_torch_dist_to_hf import main as torch_dist_to_hf

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 180
UNTIL_A_FILE_IS_TOO_LARGE = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from tools.convert_torch_dist_to_hf import main
main(sys.argv[2:])
"""
"""The system kills this process, as SIGKILL does, at the byte that its first argument says."""


def command(tool: str, *arguments: str, num_ranks: int | None = None) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *(torchrun if num_ranks else []), f"tools/{tool}.py", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(tool: str, *arguments: str, num_ranks: int | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(tool, *arguments, num_ranks=num_ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def ran_well(tool: str, *arguments: str, num_ranks: int | None = None) -> None:
    result = run(tool, *arguments, num_ranks=num_ranks)
    assert result.returncode == 0, result.stdout + result.stderr


def stored(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal_directories(one: Path, two: Path) -> None:
    first, second = stored(one), stored(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
    assert json.loads((one / "config.json").read_text()) == json.loads(
        (two / "config.json").read_text()
    )
    assert (one / "tokenizer.json").read_bytes() == (two / "tokenizer.json").read_bytes()


def test_a_tied_model_survives_the_round_trip_in_one_process(tmp_path: Path) -> None:
    hf = make_qwen3(tmp_path / "hf")
    there, back = str(tmp_path / "torch_dist"), str(tmp_path / "back")
    ran_well("convert_hf_to_torch_dist", "--hf-checkpoint", str(hf), "--save", there)
    assert (tmp_path / "torch_dist" / TRACKER).read_text().strip() in ("0", "release")
    ran_well(
        *("convert_torch_dist_to_hf", "--load", there, "--hf-checkpoint", str(hf)),
        *("--save", back),
    )
    assert_equal_directories(hf, Path(back))


@pytest.mark.full
def test_experts_survive_layouts_that_differ(tmp_path: Path) -> None:
    """Mixed dtypes too: what bf16 cannot hold stays fp32."""
    hf = make_qwen3_moe(tmp_path / "hf", dense_layers=(1,), dtype=torch.bfloat16)
    tensors = load_file(hf / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].float() + 1e-6
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    there, back = str(tmp_path / "torch_dist"), str(tmp_path / "back")
    ran_well("convert_hf_to_torch_dist", "--hf-checkpoint", str(hf), "--save", there, num_ranks=2)
    layout = ("--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2")
    ran_well(
        *("convert_torch_dist_to_hf", "--load", there, "--hf-checkpoint", str(hf)),
        *("--save", back, *layout, "--expert-tensor-parallel-size", "1", "--sequence-parallel"),
        num_ranks=2,
    )
    assert_equal_directories(hf, Path(back))


@pytest.mark.full
def test_layers_that_differ_survive_other_layouts(tmp_path: Path) -> None:
    """Qwen3.5 in bf16, with its few fp32 parameters."""
    hf = make_qwen3_5(tmp_path / "hf", dtype=torch.bfloat16)
    there, back = str(tmp_path / "torch_dist"), str(tmp_path / "back")
    ran_well("convert_hf_to_torch_dist", "--hf-checkpoint", str(hf), "--save", there, num_ranks=2)
    ran_well(
        *("convert_torch_dist_to_hf", "--load", there, "--hf-checkpoint", str(hf)),
        *("--save", back, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        num_ranks=2,
    )
    assert_equal_directories(hf, Path(back))


@pytest.mark.parametrize(
    "model", ["tiny_qwen3", pytest.param("tiny_qwen3_moe", marks=pytest.mark.full)]
)
def test_what_fsdp_saved_survives_the_way_through_torch_dist(
    megatron_ranks: Ranks, request: pytest.FixtureRequest, model: str, tmp_path: Path
) -> None:
    """Trained weights: DCP -> Hugging Face -> torch_dist -> Hugging Face, on other ranks each."""
    source: Path = request.getfixturevalue(model)
    dcp, hf, there, back = (str(tmp_path / name) for name in ("dcp", "hf", "torch_dist", "back"))
    config = jobs.make_config(source, checkpoint={"save": dcp})
    rollouts = jobs.make_rollouts(config, 1)
    (sent, _) = megatron_ranks.run_well(jobs.train_rollouts, config, rollouts, 0, (0,), num_ranks=2)
    fsdp_to_hf(["--load", dcp, "--hf-checkpoint", str(source), "--save", hf])
    argv = ["--hf-checkpoint", hf, "--save", there]
    megatron_ranks.run_well(hf_to_torch_dist, argv, num_ranks=2)
    argv = ["--load", there, "--hf-checkpoint", hf, "--save", back]
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    megatron_ranks.run_well(torch_dist_to_hf, argv + layout, num_ranks=2)
    assert_equal_directories(Path(hf), Path(back))
    found = {name: jobs.as_bytes(tensor) for name, tensor in stored(Path(back)).items()}
    assert found == sent["weights"]
    assert stored(source).keys() == found.keys()
    assert found != {name: jobs.as_bytes(tensor) for name, tensor in stored(source).items()}


Refusal = tuple[Callable[[list[str]], None], dict[str, str], tuple[str, ...]]

REFUSED: dict[str, Refusal] = {
    "another architecture": (
        hf_to_torch_dist,
        {"--num-layers": "3"},
        ("--num-layers: 3, must be 2",),
    ),
    "a flag of training": (hf_to_torch_dist, {"--rm-type": "math"}, ("--rm-type", "no flag of")),
    "a number of training": (
        hf_to_torch_dist,
        {"--lr": "3"},
        ("--lr = 3.0: is no flag of Megatron's model",),
    ),
    "a number of training that is none": (
        hf_to_torch_dist,
        {"--lr": "fast", "--seed": "2"},
        ("--lr = 'fast': is no flag of", "--seed = 2: is no flag of Megatron's model"),
    ),
    "a switch of training": (
        hf_to_torch_dist,
        {"--save": "{run}/new", "--colocate": "--use-tis"},
        ("--colocate = on: is no flag of", "--use-tis = on: is no flag of"),
    ),
    "a precision": (
        hf_to_torch_dist,
        {"--num-layers": "2", "--bf16": "--fp16"},
        ("--bf16: the checkpoint says the precision", "--fp16 = on: is no flag of Megatron's"),
    ),
    "an unknown flag": (hf_to_torch_dist, {"--num-layer": "2"}, ("--num-layer",)),
    "torch_dist as Hugging Face": (
        hf_to_torch_dist,
        {"--hf-checkpoint": "{run}"},
        ("has no config.json; it looks like a training checkpoint",),
    ),
    "a run's directory as target": (
        hf_to_torch_dist,
        {"--save": "{run}"},
        ("--save = '{run}': is not empty (iter_0000007, latest_checkpointed",),
    ),
    "Hugging Face as torch_dist": (
        torch_dist_to_hf,
        {"--load": "{hf}"},
        ("--load", "Hugging Face directory"),
    ),
    "one step of a checkpoint": (
        torch_dist_to_hf,
        {"--load": "{run}/iter_0000007"},
        ("is one step; give its parent directory",),
    ),
    "nothing to load": (
        torch_dist_to_hf,
        {"--load": "{run}/none"},
        ("--load = '{run}/none': does not exist",),
    ),
    "a model as target": (
        torch_dist_to_hf,
        {"--save": "{hf}", "--hf-checkpoint": "{run}"},
        ("--save = '{hf}': is not empty (",),
    ),
    "everything at once": (
        torch_dist_to_hf,
        {"--load": "", "--hf-checkpoint": "", "--save": "/proc/new", "--lr": "3", "--num": "2"},
        (
            ": 5 problems:\n",
            "\n  --load: is required",
            "\n  --hf-checkpoint: is required",
            "\n  --save = '/proc/new': lies in /proc",
            "\n  --lr = 3.0: is no flag of",
            "\n  --num = '2': unknown flag",
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    case: str, tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, changes, says = REFUSED[case]
    places = {"run": str(tmp_path / "run"), "hf": str(tiny_qwen3)}
    (tmp_path / "run" / "iter_0000007").mkdir(parents=True)
    (tmp_path / "run" / TRACKER).write_text("7")
    flags = {"--hf-checkpoint": "{hf}", "--save": str(tmp_path / "out")}
    if main is torch_dist_to_hf:
        flags["--load"] = "{run}"
    flags |= changes
    argv = [word.format(**places) for flag in flags.items() for word in flag]
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    printed = capsys.readouterr().err
    for text in says:
        assert text.format(**places) in printed
    assert not (tmp_path / "out" / TRACKER).exists()
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_missing_megatron_is_a_problem_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(package, "_find", lambda: None)
    for main in (hf_to_torch_dist, torch_dist_to_hf):
        with pytest.raises(SystemExit, match="2"):
            main([])
        assert "needs megatron-core, which is not installed: pip install" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_nothing(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    there, back = tmp_path / "torch_dist", tmp_path / "back"
    argv = ["--hf-checkpoint", str(tiny_qwen3), "--save", str(there)]
    answers = megatron_ranks.run_well(on_full_disk, hf_to_torch_dist, argv, 30_000, num_ranks=2)
    for code, said in answers:
        assert code == 1
        assert re.search(rf": error: checkpoint 0.* MiB are free in {there}\W*\n$", said)
        assert "Traceback" not in said
    assert list(there.iterdir()) == []

    megatron_ranks.run_well(hf_to_torch_dist, argv, num_ranks=1)
    argv = ["--load", str(there), "--hf-checkpoint", str(tiny_qwen3), "--save", str(back)]
    answers = megatron_ranks.run_well(on_full_disk, torch_dist_to_hf, argv, 50_000, num_ranks=2)
    for code, said in answers:
        assert code == 1
        assert re.search(rf": error: export to {back}.* MiB are free in {tmp_path}\W*\n$", said)
        assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.full
def test_a_killed_conversion_is_no_checkpoint_and_runs_again(tmp_path: Path) -> None:
    hf = make_qwen3(tmp_path / "hf", num_layers=8, hidden_size=256, intermediate_size=1024)
    save = tmp_path / "torch_dist"
    arguments = ("--hf-checkpoint", str(hf), "--save", str(save))
    process = subprocess.Popen(
        command("convert_hf_to_torch_dist", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not list(save.glob("*.tmp")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (save / TRACKER).exists()
    ran_well("convert_hf_to_torch_dist", *arguments)
    assert (save / TRACKER).exists()
    assert not list(save.glob("*.tmp"))


@pytest.mark.full
def test_a_killed_export_leaves_no_directory_of_its_name_and_runs_again(
    megatron_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    there, back = tmp_path / "torch_dist", tmp_path / "back"
    staged = tmp_path / "back.miles-tmp" / "model.safetensors"
    argv = ["--hf-checkpoint", str(tiny_qwen3), "--save", str(there)]
    megatron_ranks.run_well(hf_to_torch_dist, argv, num_ranks=1)
    half = (tiny_qwen3 / "model.safetensors").stat().st_size // 2
    argv = ["--load", str(there), "--hf-checkpoint", str(tiny_qwen3), "--save", str(back)]
    killed = subprocess.run(
        [sys.executable, "-c", UNTIL_A_FILE_IS_TOO_LARGE, str(half), *argv],
        cwd=ROOT,
        # A file of byte code may be larger.
        env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert killed.returncode == -signal.SIGXFSZ, killed.stdout + killed.stderr
    assert 0 < staged.stat().st_size <= half
    assert not back.exists()
    megatron_ranks.run_well(torch_dist_to_hf, argv, num_ranks=1)
    assert_equal_directories(tiny_qwen3, back)
    assert not staged.parent.exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_rank_that_converts_holds_its_share_of_the_model_and_a_few_layers(
    tmp_path: Path,
) -> None:
    """Beyond what it holds with a model of a few kilobytes; memory is sampled, so the bound is
    loose, but a rank that holds all of the model is beyond it."""
    num_layers, num_ranks = 48, 2
    model, empty = tmp_path / "model", make_qwen3(tmp_path / "empty", num_layers=num_layers)
    num_bytes = make_model(model, 512, num_layers)
    layer = sum(t.nbytes for n, t in stored(model).items() if n.startswith("model.layers.0."))
    bound = 1.5 * num_bytes / num_ranks + 4 * layer
    assert bound < num_bytes
    least = both_ways(empty, tmp_path / "out", num_ranks)
    most = both_ways(model, tmp_path / "out", num_ranks)
    for before, peak in zip(least, most, strict=True):
        assert (peak - before) * MIB < bound
