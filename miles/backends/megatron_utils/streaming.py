"""Megatron's distributed optimizer with its master weights and moments on a local disk.

Megatron keeps the flow of a step, its checkpoints and their layouts; what it reads and writes as
optimizer state are host tensors that share memory with the files.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.streamed_optimizer import MASTER, AdamShard, StreamedAdam
from miles.config.offload import OffloadConfig


class StreamedInner(torch.optim.Optimizer):
    """The Adam inside of one ``DistributedOptimizer``.

    Of a master weight nothing is left on the device but its gradient; parameters that are fp32
    themselves stay, being part of the model.
    """

    def __init__(self, part: Any, config: OffloadConfig) -> None:
        """Takes the place of the Adam of ``part``, which has made no step. Raises
        ``OffloadError``."""
        inner = part.optimizer
        super().__init__([torch.empty(0)], dict(inner.defaults))
        # PyTorch would refuse Megatron's groups: parameters that are fp32 are views of a buffer.
        self.param_groups = inner.param_groups
        self._model_shards = dict(_model_shards(part))
        shards = [
            self._shard(main, group) for group in self.param_groups for main in group["params"]
        ]
        self._adam = StreamedAdam(shards, config, decoupled=bool(inner.adam_w_mode))
        self._masters: dict[Tensor, Tensor] = {}
        mains = [main for group in self.param_groups for main in group["params"]]
        for number, main in enumerate(mains):
            tensors = self._adam.tensors(number)
            if MASTER in tensors:
                self._masters[main] = tensors.pop(MASTER)
                self._masters[main].copy_(main.detach())
                main.untyped_storage().resize_(0)
            self.state[main] = tensors

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update masters, moments and the model's shards; each group counts its steps."""
        assert closure is None, "Megatron computes the gradients before the step"
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
        self._adam.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings and step counts; the tensors are read in place."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def with_master(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A parameter's state as Megatron gave it, with the master weight that has bytes."""
        main = tensors["param"]
        return {**tensors, "param": self._masters.get(main, main)}

    def read_parameters(self) -> None:
        """Make the model's parameters the masters."""
        for main, master in self._masters.items():
            master.copy_(self._model_shards[main])

    def zero_moments(self) -> None:
        """Forget the past; masters stay."""
        self._adam.zero_moments()

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        self._masters.clear()
        self.state.clear()
        self._adam.close()

    def _shard(self, main: Tensor, group: Mapping[str, Any]) -> AdamShard:
        return AdamShard(
            numel=main.numel(),
            gradient=lambda: main.grad,
            settings=group,
            num_steps=lambda: int(group["step"]),
            parameter=self._model_shards.get(main, main.detach()),
        )


@contextmanager
def gradients_away(chunks: Sequence[Any]) -> Generator[None]:
    """While Megatron makes all master weights on the device and until they are in files, the
    gradient buffers of these chunks, all zeros before the first step, take no memory."""
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = {b.param_data.untyped_storage().data_ptr() for b in buffers}
    storages = [buffer.grad_data.untyped_storage() for buffer in buffers]
    # FP8 may gather parameters in the buffer of their gradients.
    sizes = [0 if s.data_ptr() in parameters else s.nbytes() for s in storages]
    for storage, size in zip(storages, sizes, strict=True):
        if size:
            storage.resize_(0)
    yield
    for buffer, storage, size in zip(buffers, storages, sizes, strict=True):
        if size:
            storage.resize_(size)
            buffer.grad_data.zero_()


def stream_state(optimizer: Any, config: OffloadConfig) -> list[StreamedInner]:
    """Move the state of every part of a ``MegatronOptimizer`` to the disk. Raises
    ``OffloadError``."""
    return [
        _attach(part, config) for part in optimizer.chained_optimizers if not part.is_stub_optimizer
    ]


def _attach(part: Any, config: OffloadConfig) -> StreamedInner:
    inner = StreamedInner(part, config)
    megatrons = part._get_main_param_and_optimizer_states

    def held(model_param: Tensor) -> dict[str, Tensor]:
        return inner.with_master(megatrons(model_param))

    def set_state(model_param: Tensor, tensors: Mapping[str, Any]) -> None:
        for name, target in held(model_param).items():
            if isinstance(tensors[name], Tensor):
                target.copy_(tensors[name])

    def read_parameters(state_dict: None = None) -> None:
        assert state_dict is None, "weights are loaded into the model first"
        inner.read_parameters()

    part.optimizer = inner
    part._get_main_param_and_optimizer_states = held
    part._set_main_param_and_optimizer_states = set_state
    part._copy_model_params_to_main_params = read_parameters
    # The step has done it, piece by piece.
    part._copy_main_params_to_model_params = lambda: None
    return inner


def _model_shards(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each master weight with the shard of the model's parameters that is its rounded copy: where
    ``DistributedOptimizer._copy_main_params_to_model_params`` writes it."""
    groups = zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True)
    for masters, parameters in groups:
        for main, parameter in zip(masters, parameters, strict=True):
            place = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[parameter]
            whole = part.buffers[buffer].buckets[bucket].param_data.view(-1)
            yield main, whole[place.start : place.end]
