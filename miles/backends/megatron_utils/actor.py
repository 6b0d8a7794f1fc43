"""``MegatronTrainRayActor``: the six methods of the contract on megatron-core."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.megatron_utils import cpu_platform
from miles.backends.training_utils import checkpoints, optimizer_state
from miles.backends.training_utils.consume import consume
from miles.backends.training_utils.hf_export import export_hf
from miles.contracts.engine import EngineSet
from miles.contracts.parallel import ParallelState
from miles.contracts.trainer import TrainRayActor
from miles.contracts.types import TrainBatch, TrainStats
from miles.core import logging
from miles.core.timer import Timer
from miles.weight_sync.session import make_weight_sync

if TYPE_CHECKING:
    from miles.backends.megatron_utils.sharded_state import TrainerState

log = logging.get(__name__)


class MegatronTrainRayActor(TrainRayActor):
    """Megatron's own model, split over tensor, pipeline, context and expert parallel ranks."""

    def build(self, *, with_ref: bool) -> int:
        """Raises ``ConfigError`` or ``CheckpointDirError`` for what cannot run."""
        # Megatron binds functions of torch while it is imported.
        cpu_platform.install()
        from miles.backends.megatron_utils.checkpoint import Checkpointer
        from miles.backends.megatron_utils.policy import MegatronPolicyOps

        config = self.config
        torch.manual_seed(config.algorithm.seed)
        self._checkpointer = Checkpointer(
            config.checkpoint,
            config.rollout.hf_checkpoint,
            config.algorithm.seed,
            config.cluster.distributed_timeout_minutes,
        )
        step = self._checkpointer.find()
        self.ops = MegatronPolicyOps(config, with_ref=with_ref, resumes=step is not None)
        self._weight_sync = make_weight_sync(config)
        self._timer = Timer()
        self._ref_has_moved = config.algorithm.ref_update_interval is not None
        return 0 if step is None else self._resume(step)

    @property
    def parallel(self) -> ParallelState:
        return self.ops.parallel

    def train(self, rollout_id: int, batch: TrainBatch) -> TrainStats:
        self._require_awake("train")
        algorithm = self.config.algorithm
        if algorithm.reset_optimizer_states:
            self.ops.optimizer.reset()
        self.ops.begin_rollout(rollout_id)
        stats = consume(self.ops, batch, self.config, timer=self._timer)
        interval = algorithm.ref_update_interval
        if self.ops.ref is not None and interval and (rollout_id + 1) % interval == 0:
            self.ops.copy_policy_to_ref()
        return stats

    def update_weights(self, engines: EngineSet) -> int:
        version = self._weight_sync.push(engines, self.ops.hf_weights())
        self.ops.store.give_back()
        return version

    def weight_update_seconds(self) -> Mapping[str, float]:
        return self._weight_sync.last_timings

    def save_model(self, rollout_id: int, *, force_sync: bool = False) -> None:
        self._require_awake("save_model")
        settings = self.config.checkpoint
        if settings.save is not None:
            self.ops.model.synchronize_parameters()
            self._checkpointer.save(
                rollout_id + 1,
                self._state(optimizer=not settings.no_save_optim),
                self._metadata(rollout_id),
                force_sync=force_sync,
            )
        if settings.save_hf is not None:
            source = self.config.rollout.hf_checkpoint
            assert source is not None
            directory = settings.save_hf.format(rollout_id=rollout_id)
            export_hf(directory, source, self.ops.exported(), self.ops.hf_weights())

    def sleep(self, *, keep_weights: bool = False) -> None:
        self.ops.sleep(keep_weights=keep_weights)

    def wake_up(self) -> None:
        self.ops.store.wake_up()

    def shutdown(self) -> None:
        """Finish the save in the background, then leave the process groups."""
        from miles.backends.megatron_utils.initialize import destroy

        self._weight_sync.close()
        self._checkpointer.finish()
        self.ops.close()
        destroy()
        super().shutdown()

    def _require_awake(self, method: str) -> None:
        if self.ops.store.asleep:
            raise RuntimeError(f"{method} while the trainer sleeps: call wake_up first")

    def _state(self, *, optimizer: bool) -> "TrainerState":
        return self.ops.trainer_state(optimizer=optimizer, ref=self._ref_has_moved)

    def _metadata(self, rollout_id: int) -> dict[str, Any]:
        return {
            "rollout_id": rollout_id,
            "world_size": self.parallel.world_size,
            "seed": self.config.algorithm.seed,
            "weight_version": self._weight_sync.version,
            "config": self.config.to_dict(),
            optimizer_state.KEY: self.ops.optimizer.described(),
            "dtypes": {
                tensor.name: str(tensor.dtype).removeprefix("torch.")
                for tensor in self.ops.exported()
            },
        }

    def _resume(self, step: Path) -> int:
        # A reference that moved stays where it is, also when it is not to move any more.
        self._ref_has_moved = self._ref_has_moved or self._checkpointer.has(step, "ref")
        if self._checkpointer.has(step, "optimizer"):
            optimizer_state.check(
                step,
                checkpoints.read_metadata(step),
                self.ops.optimizer.described(),
                convert=self.config.checkpoint.convert_optimizer_state,
            )
        metadata = self._checkpointer.load(step, self._state(optimizer=True))
        # The next update then gets the version that it would have had.
        self._weight_sync.version = int(metadata.get("weight_version", 0))
        log.info("resumed from %s", step)
        return int(metadata["iteration"])
