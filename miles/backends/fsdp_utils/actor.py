"""``FSDPTrainRayActor``: the six methods of the contract on PyTorch FSDP2."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.fsdp_utils import self_check
from miles.backends.fsdp_utils.checkpoint import BACKEND, Checkpointer, Snapshot
from miles.backends.fsdp_utils.model import HeadOptions, LoadOptions, ShardedModel, load_model
from miles.backends.fsdp_utils.optimizer import Optimizer
from miles.backends.fsdp_utils.parallel import build_mesh, parallel_state
from miles.backends.fsdp_utils.precision import make_precision
from miles.backends.fsdp_utils.weights import model_tensors, named_buffers, stream_weights
from miles.backends.training_utils import checkpoints, optimizer_state
from miles.backends.training_utils.consume import consume
from miles.backends.training_utils.hf_export import export_hf
from miles.backends.training_utils.losses import needs_entropy
from miles.backends.training_utils.offload_store import (
    OffloadStore,
    local_tensor,
    make_backing,
)
from miles.config.root import MilesConfig
from miles.contracts.engine import EngineSet
from miles.contracts.parallel import ParallelState
from miles.contracts.trainer import TrainRayActor, WeightsTag
from miles.contracts.types import LossFn, MicroBatch, NamedTensor, StepStats, TrainBatch, TrainStats
from miles.core import device, logging
from miles.core.timer import Timer
from miles.weight_sync.session import make_weight_sync

log = logging.get(__name__)


class FSDPPolicyOps:
    """The three primitives: see ``contracts.trainer.PolicyOps``."""

    def __init__(self, config: MilesConfig, *, with_ref: bool) -> None:
        assert config.rollout.hf_checkpoint is not None, "--hf-checkpoint"
        self.parallel = parallel_state()
        mesh = build_mesh(config.fsdp.dp_replicate_size, config.cluster.distributed_timeout_minutes)
        options = LoadOptions(
            make_precision(config),
            attention=config.fsdp.attn_implementation,
            gradient_checkpointing=config.fsdp.gradient_checkpointing,
            cpu_offload=config.fsdp.fsdp_cpu_offload,
        )
        self.model = load_model(config.rollout.hf_checkpoint, mesh, options)
        packs = config.data.use_dynamic_batch_size
        self_check.check(self.model, packs=packs)
        self.ref: ShardedModel | None = None
        if with_ref:
            path = config.algorithm.ref_load or config.rollout.hf_checkpoint
            frozen = replace(options.precision, frozen=True)
            self.ref = load_model(path, mesh, replace(options, precision=frozen, flag="--ref-load"))
            self_check.check(self.ref, packs=packs)
        self.optimizer = Optimizer(self.model, config, self.parallel)
        supervised = config.algorithm.loss_type == "sft_loss"
        self._options = HeadOptions(
            # The temperature belongs to sampling; supervised data was not sampled.
            temperature=1.0 if supervised else config.rollout.rollout_temperature,
            chunk_size=config.algorithm.log_probs_chunk_size,
        )
        self._with_entropy = needs_entropy(config.algorithm)
        self._shards_in_host_memory = config.fsdp.fsdp_cpu_offload
        self.store = OffloadStore(
            make_backing(config.offload), weights=self._weights, others=self._others
        )

    def log_probs(self, batches: Sequence[MicroBatch], *, weights: WeightsTag) -> list[Tensor]:
        model = self.model if weights == "actor" else self.ref
        assert model is not None, "built without a reference"
        with torch.no_grad():
            result = [
                model.token_stats(batch, self._options, with_entropy=False).log_probs_R
                for batch in batches
            ]
        model.reshard()
        return result

    def optimizer_step(self, batches: Sequence[MicroBatch], loss: LossFn) -> StepStats:
        return self.optimizer.step(
            batches,
            loss,
            lambda batch: self.model.token_stats(
                batch, self._options, with_entropy=self._with_entropy
            ),
        )

    def hf_weights(self) -> Iterator[NamedTensor]:
        return stream_weights(self.model.module, self.model.weights, self.store)

    def copy_policy_to_ref(self) -> None:
        """Make the reference the present policy (--ref-update-interval)."""
        assert self.ref is not None
        source = model_tensors(self.model.module)
        for key, tensor in model_tensors(self.ref.module).items():
            local_tensor(tensor).copy_(local_tensor(source[key]))

    def close(self) -> None:
        """Give disk space back."""
        self.store.close()
        self.optimizer.close()

    def _weights(self) -> dict[str, Tensor]:
        """The policy's tensors on the device; under --fsdp-cpu-offload that is no shard."""
        return self._on_device(self.model)

    def _others(self) -> dict[str, Tensor]:
        """All on the device that must survive sleep beside them."""
        state: dict[str, Tensor] = {}
        if not self._shards_in_host_memory:
            state = {f"optimizer:{k}": v for k, v in self.optimizer.resident_tensors().items()}
        if self.ref is not None:
            state |= {f"ref:{k}": v for k, v in self._on_device(self.ref).items()}
        return state

    def _on_device(self, model: ShardedModel) -> dict[str, Tensor]:
        tensors = named_buffers if self._shards_in_host_memory else model_tensors
        return tensors(model.module)


class FSDPTrainRayActor(TrainRayActor):
    """The model's own Hugging Face implementation under FSDP2."""

    def build(self, *, with_ref: bool) -> int:
        """Raises ``ConfigError`` or ``CheckpointDirError`` for what cannot run."""
        config = self.config
        torch.manual_seed(config.algorithm.seed)
        self._checkpointer = Checkpointer(
            config.checkpoint,
            config.rollout.hf_checkpoint,
            config.algorithm.seed,
            config.cluster.distributed_timeout_minutes,
        )
        step = self._checkpointer.find()
        self.ops = FSDPPolicyOps(config, with_ref=with_ref)
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
            snapshot = Snapshot(
                self._parts(optimizer=not settings.no_save_optim),
                device.rng_state(),
                self._metadata(rollout_id),
            )
            self._checkpointer.save(rollout_id + 1, snapshot, force_sync=force_sync)
        if settings.save_hf is not None:
            source = self.config.rollout.hf_checkpoint
            assert source is not None
            directory = settings.save_hf.format(rollout_id=rollout_id)
            export_hf(directory, source, self.ops.model.weights, self.ops.hf_weights())

    def sleep(self, *, keep_weights: bool = False) -> None:
        self.ops.model.reshard()
        self.ops.store.sleep(keep_weights=keep_weights)

    def wake_up(self) -> None:
        self.ops.store.wake_up()

    def shutdown(self) -> None:
        """Finish the save in the background, then leave the process group."""
        self._weight_sync.close()
        self._checkpointer.finish()
        self.ops.close()
        super().shutdown()

    def _require_awake(self, method: str) -> None:
        if self.ops.store.asleep:
            raise RuntimeError(f"{method} while the trainer sleeps: call wake_up first")

    def _parts(self, *, optimizer: bool) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by directory: to save, or to load into."""
        parts = {
            "model": self.ops.model.persistent_tensors(),
            "lr_scheduler": self.ops.optimizer.schedule_state(),
        }
        if optimizer:
            parts["optimizer"] = self.ops.optimizer.state_tensors()
        if self.ops.ref is not None and self._ref_has_moved:
            parts["ref"] = self.ops.ref.persistent_tensors()
        return parts

    def _metadata(self, rollout_id: int) -> dict[str, Any]:
        return {
            "backend": BACKEND,
            "rollout_id": rollout_id,
            "world_size": self.parallel.world_size,
            "seed": self.config.algorithm.seed,
            "weight_version": self._weight_sync.version,
            "config": self.config.to_dict(),
            optimizer_state.KEY: self.ops.optimizer.described(),
            "dtypes": {
                weight.name: str(weight.dtype).removeprefix("torch.")
                for weight in self.ops.model.weights
            },
        }

    def _resume(self, step: Path) -> int:
        # A reference that moved stays where it is, also when it is not to move any more.
        self._ref_has_moved = self._ref_has_moved or self._checkpointer.has(step, "ref")
        parts = self._parts(optimizer=True)
        for name in ("optimizer", "ref"):
            if name in parts and not self._checkpointer.has(step, name):
                del parts[name]
                log.warning("%s has no %s: it starts afresh", step, name)
        if "optimizer" in parts:
            optimizer_state.check(
                step,
                checkpoints.read_metadata(step),
                self.ops.optimizer.described(),
                convert=self.config.checkpoint.convert_optimizer_state,
            )
        metadata = self._checkpointer.load(step, parts)
        self.ops.optimizer.load_schedule_state(
            parts["lr_scheduler"], scaled_loss=metadata["config"]["precision"]["fp16"]
        )
        # The next update then gets the version that it would have had.
        self._weight_sync.version = int(metadata["weight_version"])
        log.info("resumed from %s", step)
        return int(metadata["iteration"])
