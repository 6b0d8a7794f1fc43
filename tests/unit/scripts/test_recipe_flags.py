"""The command lines that recipes and benchmarks make are ones that train.py takes."""

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import grpo_step
from benchmarks.workloads import WORKLOADS, WorkloadName
from miles.core.tracking import Tracker
from miles.utils.arguments import parse_args
from miles.utils.external_utils.command_utils import require_flags, to_argv
from scripts import (
    reverse_digits,
    run_demo_cpu,
    run_mcore_fsdp,
    run_smollm2_135m_cpu,
    run_smollm2_135m_gpu,
    smollm2,
)
from scripts.run_demo_cpu import Backend, Demo
from scripts.run_mcore_fsdp import Comparison
from scripts.run_smollm2_135m_cpu import SmolLM2
from scripts.run_smollm2_135m_gpu import SmolLM2OnAccelerator

ROOT = Path(__file__).parents[3]


def test_the_smollm2_recipe_is_a_valid_command_line(tiny_qwen3: Path, tmp_path: Path) -> None:
    recipe = SmolLM2(run_dir=tmp_path / "run", num_rollout=30)
    config = parse_args(to_argv(run_smollm2_135m_cpu.flags(recipe, tiny_qwen3)))
    assert config.cluster.train_backend == "fsdp"
    assert config.precision.fp32
    assert (config.data.rollout_batch_size, config.data.n_samples_per_prompt) == (8, 8)
    assert config.data.num_rollout == 30
    assert config.checkpoint.load == config.checkpoint.save == str(tmp_path / "run/checkpoints")


@pytest.mark.megatron
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_smollm2_recipe_for_accelerators_is_a_valid_command_line(
    backend: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    recipe = SmolLM2OnAccelerator(run_dir=tmp_path / "run", train_backend=backend)
    flags = run_smollm2_135m_gpu.flags(recipe, tiny_qwen3)
    config = parse_args(to_argv({**flags, "rollout-engine": "embedded"}))
    assert config.cluster.train_backend == backend
    assert config.offload.offload_train
    assert config.data.num_rollout == 60


def test_a_recipe_checks_its_flags_before_it_makes_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "model"
    recipe = SmolLM2(train_backend="foo", num_rollout=-1, max_digits=0, run_dir=tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        require_flags(run_smollm2_135m_cpu.flags(recipe, missing), [missing])
    said = capsys.readouterr().err
    assert "3 problems:" in said
    assert "--train-backend = 'foo'" in said
    assert "--num-rollout = -1" in said
    assert "max_digits must be >= min_digits" in said
    assert "--hf-checkpoint" not in said

    good = SmolLM2(run_dir=tmp_path / "run")
    require_flags(run_smollm2_135m_cpu.flags(good, missing), [missing])


def test_a_recipe_with_a_wrong_flag_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.prepare, "__defaults__", ("fp32", tmp_path))
    monkeypatch.setattr(smollm2.place, "__defaults__", ("fp32", tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        run_smollm2_135m_cpu.main(SmolLM2(train_backend="foo"))
    with pytest.raises(SystemExit, match="2"):
        run_smollm2_135m_gpu.main(SmolLM2OnAccelerator(train_backend="foo"))
    assert list(tmp_path.iterdir()) == []


def test_more_flags_of_a_recipe_need_no_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, run_dir = str(ROOT / "scripts" / "run_smollm2_135m_gpu.py"), str(tmp_path / "run")
    more = "--made-up 'two words' --colocate"
    monkeypatch.setattr(sys, "argv", [script, "--run-dir", run_dir, "--flags", more])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(script, run_name="__main__")
    assert "  --made-up = 'two words': unknown flag" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_checks_its_flags_before_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "seed-0" / "reward.png"
    kept.parent.mkdir()
    kept.write_text("result")
    with pytest.raises(SystemExit, match="2"):
        run_demo_cpu.main(Demo(num_rollout=0, run_dir=tmp_path))
    said = capsys.readouterr().err
    assert "1 problem:" in said
    assert "--num-rollout = 0" in said
    assert kept.read_text() == "result"

    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        run_demo_cpu.main(Demo(run_dir=tmp_path / "file"))
    assert "--run-dir" in capsys.readouterr().err


def test_the_comparison_checks_its_flags_before_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    recipe = Comparison(train_backend="fsdp", tensor_model_parallel_size=2, folder=folder)
    with pytest.raises(SystemExit, match="2"):
        run_mcore_fsdp.main(recipe)
    assert "--tensor-model-parallel-size" in capsys.readouterr().err
    recipe = Comparison(train_backend="megatron", tensor_model_parallel_size=0, folder=folder)
    assert run_mcore_fsdp.main(recipe) == 2
    assert "--tensor-model-parallel-size 0" in capsys.readouterr().err
    assert not folder.exists()


def test_bf16_leaves_fp32_out(tiny_qwen3: Path) -> None:
    flags = run_smollm2_135m_cpu.flags(SmolLM2(dtype="bf16"), tiny_qwen3)
    assert not parse_args(to_argv(flags)).precision.fp32


@pytest.mark.parametrize("name", ["smollm2", "demo"])
def test_a_benchmark_is_a_valid_command_line(
    name: WorkloadName, tiny_qwen3: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input": "r1234="}\n')
    options = grpo_step.Benchmark(workload=name, num_steps=4, num_warmup=1)
    flags = grpo_step.miles_flags(options, WORKLOADS[name], tmp_path)
    config = parse_args(to_argv({**flags, "hf-checkpoint": tiny_qwen3}))
    assert config.data.num_rollout == 5
    assert config.data.rollout_batch_size == WORKLOADS[name].num_prompts


@pytest.mark.megatron
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_demo_is_a_valid_command_line_for_both_backends(
    backend: Backend, tiny_qwen3: Path, tmp_path: Path
) -> None:
    made_data(tmp_path)
    demo = Demo(train_backend=backend)
    config = parse_args(to_argv(run_demo_cpu.reinforcement_flags(demo, tmp_path, tiny_qwen3)))
    assert config.cluster.train_backend == backend
    assert config.data.num_rollout == 200
    assert ("--sequence-parallel" in config.megatron_argv) == (backend == "megatron")


@pytest.mark.megatron
@pytest.mark.parametrize("given", [False, True], ids=["demo", "checkpoint"])
def test_the_comparison_differs_in_backend_and_directory_alone(
    given: bool, tiny_qwen3: Path, tmp_path: Path
) -> None:
    made_data(tmp_path)
    lines: list[dict[str, object]] = []
    for backend in run_mcore_fsdp.BACKENDS:
        recipe = Comparison(
            train_backend=backend,
            hf_checkpoint=tiny_qwen3 if given else None,
            num_rollout=7,
            tensor_model_parallel_size=1,
            folder=tmp_path / "out",
        )
        flags = run_mcore_fsdp.flags(recipe, tmp_path, tiny_qwen3)
        config = parse_args(to_argv(flags))
        assert config.cluster.train_backend == backend
        assert config.data.num_rollout == 7
        lines.append(
            {name: str(value).replace(f"out/{backend}", "") for name, value in flags.items()}
        )
        del lines[-1]["train-backend"]
    assert lines[0] == lines[1]


def test_the_comparison_is_drawn_when_both_runs_are_there(tmp_path: Path) -> None:
    for position, backend in enumerate(run_mcore_fsdp.BACKENDS):
        assert run_mcore_fsdp.draw(tmp_path) is None
        tracker = Tracker(tmp_path / backend)
        tracker.log(1, {"rollout/raw_reward": 0.5 * position, "train/loss": 1.0})
        tracker.close()
    picture = run_mcore_fsdp.draw(tmp_path)
    assert picture == tmp_path / "comparison.png"
    assert picture.stat().st_size > 0


def test_an_earlier_run_of_the_comparison_is_left_alone_unless_it_is_to_be_replaced(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = made_earlier_run(tmp_path)
    recipe = Comparison(train_backend="fsdp", hf_checkpoint=tiny_qwen3, folder=tmp_path)
    assert run_mcore_fsdp.main(recipe) == 2
    assert "--replace" in capsys.readouterr().err
    assert kept.read_text() == "result"


def test_flags_that_train_refuses_do_not_cost_the_earlier_run_of_the_comparison(
    tmp_path: Path,
) -> None:
    kept = made_earlier_run(tmp_path)
    typo = tmp_path / "no-such-model"
    recipe = Comparison(train_backend="fsdp", hf_checkpoint=typo, folder=tmp_path, replace=True)
    with pytest.raises(SystemExit) as refused:
        run_mcore_fsdp.main(recipe)
    assert refused.value.code == 2
    assert kept.read_text() == "result"


def made_earlier_run(folder: Path) -> Path:
    """A file of it."""
    kept = folder / "fsdp" / "reward.png"
    kept.parent.mkdir()
    kept.write_text("result")
    return kept


def made_data(folder: Path) -> None:
    reverse_digits.write_data(folder / "data", 0, num_supervised=1, num_train=64, num_eval=4)
