"""The three primitives of the contract on megatron-core, and all that the trainer's rank holds."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.megatron_utils.bridge import converter_of
from miles.backends.megatron_utils.caches import drop_caches
from miles.backends.megatron_utils.checkpoint import find_weights, load_weights
from miles.backends.megatron_utils.chunks import build_chunks
from miles.backends.megatron_utils.converters import Converter
from miles.backends.megatron_utils.head import HeadOptions
from miles.backends.megatron_utils.initialize import initialize, parallel_state
from miles.backends.megatron_utils.model import PolicyModel
from miles.backends.megatron_utils.optimizer import Optimizer
from miles.backends.megatron_utils.padding import hold_padding
from miles.backends.megatron_utils.rematerialize import RebuiltWeights
from miles.backends.megatron_utils.sharded_state import TrainerState
from miles.backends.megatron_utils.shards import local_tensors
from miles.backends.megatron_utils.weights import exported, load_hf, stream_hf
from miles.backends.training_utils.hf_files import Header, HFFiles
from miles.backends.training_utils.losses import needs_entropy
from miles.backends.training_utils.offload_store import OffloadStore, make_backing
from miles.config.derived import is_supervised, total_optimizer_steps
from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.hooks import load_hook
from miles.contracts.trainer import WeightsTag
from miles.contracts.types import LossFn, MicroBatch, NamedTensor, StepStats
from miles.core.hf import load_config


class MegatronPolicyOps:
    """The three primitives: see ``contracts.trainer.PolicyOps``."""

    def __init__(self, config: MilesConfig, *, with_ref: bool, resumes: bool) -> None:
        """Build everything; weights are read unless a checkpoint of the run will fill them.

        Collective. Raises ``ConfigError`` or ``CheckpointDirError`` on every rank.
        """
        path = config.rollout.hf_checkpoint
        assert path is not None, "--hf-checkpoint"
        self._config = config
        self.args = initialize(config)
        _call_hook("custom_megatron_init_path", config.hooks.custom_megatron_init_path, self.args)
        self.parallel = parallel_state()
        self._files, self._converter = HFFiles(path), self._converter_of("--hf-checkpoint", path)
        chunks = build_chunks(self.args, trainable=True)
        hold_padding(chunks, load_config(path))
        if not resumes:
            self._read_initial_weights(chunks)
        options = HeadOptions(
            # The temperature belongs to sampling; supervised data was not sampled.
            temperature=1.0 if is_supervised(config) else config.rollout.rollout_temperature,
            chunk_size=config.algorithm.log_probs_chunk_size,
        )
        self.model = PolicyModel(chunks, self.args, self.parallel, options)
        self.optimizer = Optimizer(
            chunks, self.args, config.optimizer, total_optimizer_steps(config), config.offload
        )
        self.ref: PolicyModel | None = None
        if with_ref:
            frozen = build_chunks(self.args, trainable=False)
            self._read_reference(frozen)
            self.ref = PolicyModel(frozen, self.args, self.parallel, options)
        self._with_entropy = needs_entropy(config.algorithm)
        self._rollout_id = self._step_id = 0
        self._rebuilt = RebuiltWeights(config.offload, self._mastered, self.optimizer)
        self.store = OffloadStore(
            make_backing(config.offload),
            weights=self._weights,
            others=self._others,
            scratch=self._gradients,
            derived=self._rebuilt.derived,
            rebuild=self._rebuilt.rebuild,
        )

    def begin_rollout(self, rollout_id: int) -> None:
        """Steps are counted within the rollout, for the hook before each of them."""
        self._rollout_id, self._step_id = rollout_id, 0

    def log_probs(self, batches: Sequence[MicroBatch], *, weights: WeightsTag) -> list[Tensor]:
        model = self.model if weights == "actor" else self.ref
        assert model is not None, "built without a reference"
        prefix = "ref_" if weights == "ref" else ""
        path = self._config.hooks.custom_megatron_before_log_prob_hook_path
        field = "custom_megatron_before_log_prob_hook_path"
        self._call_with_model(field, path, model.chunks, prefix)
        return model.log_probs(batches)

    def optimizer_step(self, batches: Sequence[MicroBatch], loss: LossFn) -> StepStats:
        self._call_step_hook()
        self.optimizer.zero_grad()
        sums = self.model.forward_backward(batches, loss, with_entropy=self._with_entropy)
        stats = self.optimizer.step(sums)
        if not stats.skipped:
            self.model.parameters_changed()
        return stats

    def hf_weights(self) -> Iterator[NamedTensor]:
        if not self.store.asleep:
            self.model.synchronize_parameters()
        yield from stream_hf(
            self.model.chunks,
            self._converter,
            self._files,
            self.store.read,
            fp16=self._config.precision.fp16,
        )

    def exported(self) -> list[Header]:
        """What ``hf_weights`` yields, in its order."""
        return exported(self._converter, self._files, fp16=self._config.precision.fp16)

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the device memory of weights, optimizer and gradients. Collective."""
        if not self.store.asleep:
            self.model.synchronize_parameters()
            self._rebuilt.note()
            drop_caches()
        self.store.sleep(keep_weights=keep_weights)

    def close(self) -> None:
        """Let go of model, gradients, disk space and process groups; nothing can be called after
        it.

        Gradient hooks keep Megatron's wrapper alive as long as the process, in a circle that
        Python's collector does not see: so the wrapper is emptied.
        """
        self.store.close()
        self.optimizer.close()
        for chunk in self.optimizer.chunks:
            vars(chunk).clear()

    def copy_policy_to_ref(self) -> None:
        """Make the reference the present policy (--ref-update-interval). Collective."""
        assert self.ref is not None
        self.model.synchronize_parameters()
        source = _tensors(self.model.chunks)
        with torch.no_grad():
            for name, tensor in _tensors(self.ref.chunks).items():
                tensor.copy_(source[name])

    def trainer_state(self, *, optimizer: bool, ref: bool) -> TrainerState:
        """What a checkpoint is written from or read into."""
        return TrainerState(
            args=self.args,
            chunks=self.model.chunks,
            optimizer=self.optimizer.megatron if optimizer else None,
            scheduler=self.optimizer.schedule,
            ref=self.ref.chunks if ref and self.ref is not None else None,
        )

    def _call_step_hook(self) -> None:
        position = (self._rollout_id, self._step_id)
        objects = (self.model.chunks, self.optimizer.megatron, self.optimizer.schedule)
        path = self._config.hooks.custom_megatron_before_train_step_hook_path
        field = "custom_megatron_before_train_step_hook_path"
        self._call_with_model(field, path, *position, *objects)
        self._step_id += 1

    def _call_with_model(self, field: str, path: str | None, *arguments: Any) -> None:
        """With the parameters that every rank has updated."""
        if path is not None:
            self.model.synchronize_parameters()
        _call_hook(field, path, self.args, *arguments)

    def _read_initial_weights(self, chunks: list[nn.Module]) -> None:
        """Of a torch_dist directory given as the reference, else of the Hugging Face one."""
        step = self._torch_dist_reference()
        if step is not None:
            load_weights(step, TrainerState(args=self.args, chunks=chunks), "--ref-load")
        else:
            load_hf(chunks, self._converter, self._files.directory)

    def _read_reference(self, chunks: list[nn.Module]) -> None:
        step, path = self._torch_dist_reference(), self._config.algorithm.ref_load
        if step is not None:
            load_weights(step, TrainerState(args=self.args, chunks=chunks), "--ref-load")
        elif path is not None:
            load_hf(chunks, self._converter_of("--ref-load", path), path)
        else:
            load_hf(chunks, self._converter, self._files.directory)

    def _converter_of(self, flag: str, path: str) -> Converter:
        try:
            return converter_of(load_config(path), self.args.spec)
        except ValueError as error:
            raise ConfigError([Problem(flag, path, str(error))]) from error

    def _torch_dist_reference(self) -> Path | None:
        path = self._config.algorithm.ref_load
        return None if path is None else find_weights("--ref-load", path)

    def _weights(self) -> dict[str, Tensor]:
        """The policy's parameters under their global names, and its buffers."""
        buffers = {f"buffer:{k}": v for k, v in _buffers(self.model.chunks).items()}
        return local_tensors(self.model.chunks) | buffers

    def _others(self) -> dict[str, Tensor]:
        """All that must survive sleep beside them."""
        state = {f"optimizer:{k}": v for k, v in self.optimizer.resident_tensors().items()}
        if self.ref is not None:
            state |= {f"ref:{k}": v for k, v in _tensors(self.ref.chunks).items()}
        return state

    def _mastered(self) -> dict[str, Tensor]:
        """The policy's parameters that are rounded copies of master weights."""
        return {
            name: parameter
            for name, parameter in local_tensors(self.model.chunks).items()
            if parameter.requires_grad and parameter.dtype != torch.float32
        }

    def _gradients(self) -> dict[str, Tensor]:
        """The buffers of DDP, which every step zeroes before it begins."""
        found: dict[str, Tensor] = {}
        for number, chunk in enumerate(self.optimizer.chunks):
            for index, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
                found[f"{number}.{index}"] = buffer.grad_data
        return found


_load = cache(load_hook)


def _call_hook(field: str, path: str | None, *arguments: Any) -> None:
    """The user's function of that field of ``HooksConfig``, if there is one."""
    function = _load(field, path)
    if function is not None:
        function(*arguments)


def _buffers(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    # The names of a module behind its wrappers, which a reference does not have.
    return {
        f"{number}.{name.replace('module.', '')}": buffer
        for number, chunk in enumerate(chunks)
        for name, buffer in chunk.named_buffers()
    }


def _tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {**local_tensors(chunks), **_buffers(chunks)}
