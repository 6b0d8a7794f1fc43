"""A job's flags as arguments of SGLang's server."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles.backends.sglang_utils.arguments import cpu_arguments, server_arguments
from miles.config.root import MilesConfig


def job(model: Path, **rollout: object) -> MilesConfig:
    config = MilesConfig()
    return replace(config, rollout=replace(config.rollout, hf_checkpoint=str(model), **rollout))


def value(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1, flag
    return arguments[arguments.index(flag) + 1]


def test_the_flags_of_the_engine_reach_the_server(tiny_qwen3: Path) -> None:
    config = job(
        tiny_qwen3,
        sglang_context_length=100_000,
        sglang_max_running_requests=7,
        sglang_log_level="INFO",
        rollout_engine="sglang",
    )
    arguments = server_arguments(config, index=3, num_engines=4)
    assert value(arguments, "--model-path") == str(tiny_qwen3)
    assert value(arguments, "--context-length") == "100000"
    assert value(arguments, "--max-running-requests") == "7"
    assert value(arguments, "--log-level") == "info"
    assert value(arguments, "--random-seed") == "45"


def test_the_dtype_is_the_checkpoints_or_float16_under_fp16(
    tiny_qwen3: Path, tiny_qwen3_untied: Path
) -> None:
    def dtype(config: MilesConfig) -> str:
        return value(server_arguments(config, index=0, num_engines=1), "--dtype")

    assert dtype(job(tiny_qwen3)) == "float32"
    assert dtype(job(tiny_qwen3_untied)) == "bfloat16"
    config = job(tiny_qwen3)
    assert dtype(replace(config, precision=replace(config.precision, fp16=True))) == "float16"


def test_engines_of_one_host_share_its_memory(tiny_qwen3: Path) -> None:
    config = job(tiny_qwen3, sglang_context_length=100_000)
    arguments = cpu_arguments(config, num_engines=4)
    assert value(arguments, "--mem-fraction-static") == "0.2"
    # A request as long as the context must fit into the cache.
    assert value(arguments, "--max-total-tokens") == "100000"
    assert value(cpu_arguments(job(tiny_qwen3), 1), "--max-total-tokens") == "65536"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_the_server_runs_on_the_host(tiny_qwen3: Path) -> None:
    arguments = server_arguments(job(tiny_qwen3), index=0, num_engines=1)
    assert value(arguments, "--device") == "cpu"
    assert value(arguments, "--max-running-requests") == "256"
    assert value(arguments, "--cuda-graph-backend-decode") == "disabled"
