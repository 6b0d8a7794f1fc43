"""How FSDP2 divides a model, and gradients of parameters that not every rank used."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from transformers import PreTrainedModel

from miles.contracts.parallel import ParallelState
from miles.core import device, logging

log = logging.get(__name__)


def shard(
    module: PreTrainedModel,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> None:
    """One FSDP unit per block, one per untied embedding, the rest with the root."""
    blocks = set(module._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    if not blocks:
        log.info("%s names no blocks: it is sharded as one unit", type(module).__name__)
    head = module.get_output_embeddings()
    inputs = module.get_input_embeddings().parameters()
    tied = head is not None and any(parameter is head.weight for parameter in inputs)
    for part in list(module.modules()):
        if type(part).__name__ in blocks or (isinstance(part, nn.Embedding) and not tied):
            fully_shard(part, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    fully_shard(module, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Losses are divided by global counts already: gradients add up, they do not average.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


class UsedParameters:
    """Which parameters got a gradient in a step: not the same on every rank where a model holds its
    experts one by one and computes those that a token chose.

    FSDP2 packs the gradients that a rank has and reduces that: ranks with others would add
    gradients of different parameters. So each gives zeros for what it did not use, and what no
    rank used has no gradient in the end, as in one process.
    """

    def __init__(self, module: nn.Module) -> None:
        self._used: set[Tensor] = set()
        for part in module.modules():
            if isinstance(part, FSDPModule):
                group: Any = part._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
                if group is not None:
                    self._complete_before_reduction(group)

    def drop_unused(self, parameters: Iterable[Tensor], parallel: ParallelState) -> None:
        """At the end of a step, take the zeros from parameters that no rank used; collective."""
        listed = list(parameters)
        flags = torch.tensor([parameter in self._used for parameter in listed])
        counts = parallel.dp_sum(flags.int().to(device.current_device()))
        for parameter, count in zip(listed, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None
        self._used.clear()

    def _complete_before_reduction(self, group: Any) -> None:
        # PyTorch has no hook between the gradients of a unit and their reduction.
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            # It may be called a second time, with nothing left to reduce.
            if group.reduce_grads and group._training_state != TrainingState.POST_BACKWARD:
                self._complete(group.fsdp_params)
            reduce(*unused)

        group.post_backward = post_backward

    def _complete(self, fsdp_params: Iterable[Any]) -> None:
        # What no forward pass ever gathered has no place for a gradient.
        trained = [
            p
            for p in fsdp_params
            if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")
        ]
        accumulates = any(p.unsharded_accumulated_grad is not None for p in trained)
        for p in trained:
            if p.unsharded_accumulated_grad is not None:
                self._used.add(p.sharded_param)
                continue
            if p.unsharded_param.grad is not None:
                self._used.add(p.sharded_param)
            else:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
            if accumulates:
                # Those of earlier micro-batches are fp32, and one reduction takes one dtype.
                p.to_accumulated_grad_if_needed()
