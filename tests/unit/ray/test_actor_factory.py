"""The environment of trainer processes."""

from typing import Any

from miles.config.cluster import ClusterConfig
from miles.config.root import MilesConfig
from miles.ray.train.actor_factory import trainer_environment


def environment(**cluster: Any) -> dict[str, str]:
    return trainer_environment(MilesConfig(cluster=ClusterConfig(**cluster)), on_gpu=True)


def test_megatrons_processes_start_kernels_in_the_order_of_their_calls() -> None:
    assert environment(train_backend="megatron")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(train_backend="fsdp")


def test_a_users_own_variables_win() -> None:
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    found = environment(train_backend="megatron", train_env_vars=given)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
