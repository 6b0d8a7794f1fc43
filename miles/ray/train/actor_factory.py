"""``--train-backend`` → class → one actor per trainer rank, each with its environment."""

import os
from collections.abc import Mapping
from typing import Any

import ray

from miles.backends.sglang_utils.nccl import nccl_environment
from miles.config.root import MilesConfig
from miles.contracts.trainer import TrainRayActor
from miles.core import device, distributed, logging
from miles.core.registry import Registry
from miles.ray.placement import Layout, Placement
from miles.rollout.engine_set import EngineAddresses, HttpEngineSet

BACKENDS: Registry[type[TrainRayActor]] = Registry(
    "training backend",
    {
        "fsdp": "miles.backends.fsdp_utils.actor:FSDPTrainRayActor",
        "megatron": "miles.backends.megatron_utils.actor:MegatronTrainRayActor",
    },
)

SHARE_OF_A_SLOT = 0.4
"""Leaves room on the same slot for a colocated engine and a critic."""


class _Process:
    """What a rank's process needs around the contract; mixed into the backend's class."""

    _engines: HttpEngineSet | None = None
    _addresses: EngineAddresses | None = None

    def host_rendezvous(self) -> tuple[str, int]:
        """Serve the job's rendezvous here (rank 0); return its address."""
        host = ray.util.get_node_ip_address()
        return host, distributed.host_rendezvous(host)

    def prepare(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        logging.setup(f"trainer {rank}", level=logging.INFO if rank == 0 else logging.WARNING)

    def measured(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        """Call a method; its answer, and the most bytes that PyTorch held on the device meanwhile
        (0 without an accelerator)."""
        device.reset_peak()
        answer = getattr(self, method)(*args, **kwargs)
        return answer, device.memory_stats().peak_bytes

    def update_weights_at(self, addresses: EngineAddresses) -> tuple[int, Mapping[str, float]]:
        """``update_weights`` for engines given by address; connections are kept while they stay.
        Returns the version, and the seconds of each phase."""
        assert isinstance(self, TrainRayActor)
        if self._engines is None or addresses != self._addresses:
            if self._engines is not None:
                self._engines.close()
            timeout_s = self.config.weight_sync.update_weight_timeout_s
            self._engines = HttpEngineSet.of(addresses, timeout_s=timeout_s)
            self._addresses = addresses
        return self.update_weights(self._engines), self.weight_update_seconds()

    def dp_rank(self) -> int:
        assert isinstance(self, TrainRayActor)
        return self.parallel.dp_rank


def trainer_environment(config: MilesConfig, *, on_gpu: bool) -> dict[str, str]:
    """Environment of every trainer process; ``--train-env-vars`` goes on top."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.train_backend == "megatron":
        # Kernels start in the order of their calls, so that communication hides behind compute;
        # before Blackwell Megatron insists on it.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if on_gpu:
        environment |= nccl_environment(config.sglang_argv)
    else:
        ranks = config.cluster.actor_num_gpus_per_node
        environment |= device.thread_environment(ranks)
    return environment | {k: str(v) for k, v in config.cluster.train_env_vars.items()}


def create_actors(config: MilesConfig, layout: Layout, placement: Placement) -> list[Any]:
    """Start the rank processes in rank order, without building any model yet."""
    backend = BACKENDS.load(config.cluster.train_backend)
    worker = type(backend.__name__, (_Process, backend), {})
    environment = trainer_environment(config, on_gpu=placement.on_gpu)
    return [
        ray.remote(worker)
        .options(
            name=None,
            runtime_env={"env_vars": environment},
            **placement.actor_options(slot, SHARE_OF_A_SLOT),
        )
        .remote()
        for slot in layout.train_slots
    ]
