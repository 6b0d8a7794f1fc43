"""The environment of trainer processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.config.cluster import ClusterConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.ray.rollout.engine_launch import EnginePart, embedded_launch, sglang_launch
from miles.ray.train.actor_factory import trainer_environment


def environment(**cluster: Any) -> dict[str, str]:
    return trainer_environment(MilesConfig(cluster=ClusterConfig(**cluster)), on_gpu=True)


def test_megatrons_processes_start_kernels_in_the_order_of_their_calls() -> None:
    assert environment(train_backend="megatron")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(train_backend="fsdp")


@pytest.mark.parametrize(("argv", "value"), [((), "0"), (("--enable-symm-mem",), "1")])
def test_trainer_and_engines_have_the_same_environment_of_nccl(
    argv: tuple[str, ...], value: str, tmp_path: Path
) -> None:
    rollout = RolloutConfig(hf_checkpoint="/models/m", sglang_dtype="float32")
    config = replace(MilesConfig(rollout=rollout), sglang_argv=argv)
    part = EnginePart(engine=0, host="127.0.0.1")
    assert trainer_environment(config, on_gpu=True)["NCCL_CUMEM_ENABLE"] == value
    for launch in (sglang_launch, embedded_launch):
        assert launch(config, part, tmp_path).environment["NCCL_CUMEM_ENABLE"] == value


def test_a_users_own_variables_win() -> None:
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    found = environment(train_backend="megatron", train_env_vars=given)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
