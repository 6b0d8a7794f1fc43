"""The command lines that recipes and benchmarks make are ones that train.py takes."""

from pathlib import Path

import pytest

from benchmarks import grpo_step
from benchmarks.workloads import WORKLOADS, WorkloadName
from miles.utils.arguments import parse_args
from miles.utils.external_utils.command_utils import to_argv
from scripts import run_smollm2_135m_cpu
from scripts.run_smollm2_135m_cpu import SmolLM2


def test_the_smollm2_recipe_is_a_valid_command_line(tiny_qwen3: Path, tmp_path: Path) -> None:
    recipe = SmolLM2(run_dir=tmp_path / "run", num_rollout=30)
    config = parse_args(to_argv(run_smollm2_135m_cpu.flags(recipe, tiny_qwen3)))
    assert config.cluster.train_backend == "fsdp"
    assert config.precision.fp32
    assert (config.data.rollout_batch_size, config.data.n_samples_per_prompt) == (8, 8)
    assert config.data.num_rollout == 30
    assert config.checkpoint.load == config.checkpoint.save == str(tmp_path / "run/checkpoints")


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
