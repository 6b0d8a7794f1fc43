"""``--train-backend`` → class, in one actor per trainer rank, each with its environment."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from miles.backends.sglang_utils.nccl import nccl_environment
from miles.config.root import MilesConfig
from miles.contracts.trainer import TrainRayActor
from miles.contracts.types import TrainBatch, TrainStats
from miles.core import device, device_environment, distributed, logging
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

type Measured[T] = tuple[T, int]
"""An answer, and the most bytes that PyTorch held on the device meanwhile (0 without an
accelerator)."""

type WeightUpdate = tuple[int, Mapping[str, float]]
"""The version, and the seconds of each phase."""

SHARE_OF_A_SLOT = 0.4
"""Leaves room on the same slot for a colocated engine and a critic."""


class TrainerProcess:
    """Ray actor: the process of one trainer rank, around its backend."""

    def __init__(self, backend: str) -> None:
        # Imported here and not in the driver, beside whatever else starts: it takes seconds.
        self._trainer = BACKENDS.load(backend)()
        self._engines: HttpEngineSet | None = None
        self._addresses: EngineAddresses | None = None

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

    def init(self, config: MilesConfig, *, with_ref: bool) -> int:
        return self._trainer.init(config, with_ref=with_ref)

    def dp_rank(self) -> int:
        return self._trainer.parallel.dp_rank

    def train(self, rollout_id: int, batch: TrainBatch) -> Measured[TrainStats]:
        return _measured(lambda: self._trainer.train(rollout_id, batch))

    def update_weights(self, addresses: EngineAddresses) -> Measured[WeightUpdate]:
        """Of engines given by address; connections are kept while they stay."""
        if self._engines is None or addresses != self._addresses:
            if self._engines is not None:
                self._engines.close()
            timeout_s = self._trainer.config.weight_sync.update_weight_timeout_s
            self._engines = HttpEngineSet.of(addresses, timeout_s=timeout_s)
            self._addresses = addresses
        engines = self._engines
        return _measured(
            lambda: (self._trainer.update_weights(engines), self._trainer.weight_update_seconds())
        )

    def save_model(self, rollout_id: int, *, force_sync: bool) -> Measured[None]:
        return _measured(lambda: self._trainer.save_model(rollout_id, force_sync=force_sync))

    def sleep(self, *, keep_weights: bool) -> None:
        self._trainer.sleep(keep_weights=keep_weights)

    def wake_up(self) -> None:
        self._trainer.wake_up()

    def shutdown(self) -> None:
        self._trainer.shutdown()


def _measured[T](work: Callable[[], T]) -> Measured[T]:
    device.reset_peak()
    answer = work()
    return answer, device.memory_stats().peak_bytes


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
        environment |= device_environment.thread_environment(ranks)
    return environment | {k: str(v) for k, v in config.cluster.train_env_vars.items()}


def create_actors(config: MilesConfig, layout: Layout, placement: Placement) -> list[Any]:
    """Start the rank processes in rank order, without building any model yet."""
    environment = trainer_environment(config, on_gpu=placement.on_gpu)
    return [
        ray.remote(TrainerProcess)
        .options(
            name=None,
            runtime_env={"env_vars": environment},
            **placement.actor_options(slot, SHARE_OF_A_SLOT),
        )
        .remote(config.cluster.train_backend)
        for slot in layout.train_slots
    ]
