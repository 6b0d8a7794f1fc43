"""The contract between a training backend and everything else.

``TrainRayActor`` is what the rest of the job sees: six methods. ``PolicyOps`` is what really
differs between backends: three primitives, on which ``training_utils/consume.py`` writes the
driver of ``train`` once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, final

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineSet
from miles.contracts.parallel import ParallelState
from miles.contracts.types import (
    LossFn,
    MicroBatch,
    NamedTensor,
    StepStats,
    TrainBatch,
    TrainStats,
)
from miles.core import distributed

if TYPE_CHECKING:
    from torch import Tensor

WeightsTag = Literal["actor", "ref"]


class PolicyOps(Protocol):
    """The primitives of a backend. Every method is collective over the trainer's ranks."""

    @property
    def parallel(self) -> ParallelState: ...

    def log_probs(self, batches: Sequence[MicroBatch], *, weights: WeightsTag) -> list["Tensor"]:
        """Return float32 ``[R]`` log-probs of each micro-batch, without gradient."""
        ...

    def optimizer_step(self, batches: Sequence[MicroBatch], loss: LossFn) -> StepStats:
        """Take one optimizer step on the summed loss of ``batches`` over all ranks."""
        ...

    def hf_weights(self) -> Iterator[NamedTensor]:
        """Yield the current full weights under Hugging Face names, in the checkpoint's dtypes.

        Works while the actor sleeps. Parameters come in the model's order; a tied parameter
        comes once, under the name the checkpoint uses.
        """
        ...


class TrainRayActor(ABC):
    """Owns the model on one training rank, in a Ray actor (``actor_factory.py``).

    The process environment carries ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` before ``init`` is called.
    """

    config: MilesConfig

    @final
    def init(self, config: MilesConfig, *, with_ref: bool = False) -> int:
        """Join the process group, bind the device, build; return the first rollout id to run:
        ``--start-rollout-id`` where it is given, else the one behind the checkpoint's."""
        self.config = config
        distributed.init_process_group(
            config.cluster.distributed_timeout_minutes, config.fsdp.fsdp_cpu_backend
        )
        next_rollout_id = self.build(with_ref=with_ref)
        given = config.data.start_rollout_id
        return next_rollout_id if given is None else given

    @abstractmethod
    def build(self, *, with_ref: bool) -> int:
        """Build model, optimizer and layout; resume from ``--load``; return the rollout id that
        follows the checkpoint, 0 without one."""

    @property
    @abstractmethod
    def parallel(self) -> ParallelState: ...

    @abstractmethod
    def train(self, rollout_id: int, batch: TrainBatch) -> TrainStats:
        """Take this rollout's optimizer steps on this rank's shard."""

    @abstractmethod
    def update_weights(self, engines: EngineSet) -> int:
        """Push the current weights into the engines; return the new weight version."""

    @abstractmethod
    def save_model(self, rollout_id: int, *, force_sync: bool = False) -> None:
        """Write the checkpoint of a completed rollout. With ``force_sync`` it is durable on return,
        and so is every save that was still being written."""

    @abstractmethod
    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the training device's memory, keeping the state in host memory or on disk.
        Idempotent. With ``keep_weights`` the policy's weights stay on the device, for
        ``update_weights``; another call without it frees them too. Raises ``OffloadError`` and
        leaves what it was about to free as it was."""

    @abstractmethod
    def wake_up(self) -> None:
        """Undo ``sleep`` bit for bit. Idempotent."""

    def weight_update_seconds(self) -> Mapping[str, float]:
        """Seconds of the last weight update by phase, for metrics."""
        return {}

    def shutdown(self) -> None:
        """Leave the process group."""
        distributed.destroy_process_group()
