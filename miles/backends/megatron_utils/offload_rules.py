"""What sleep, streaming and rematerializing need of Megatron: pure rules, as ``rules.py``."""

import argparse

from miles.config.errors import Problem
from miles.config.root import MilesConfig

_STREAM = "--stream-optimizer-state-to-disk"
_REBUILD = "--rematerialize-param-from-master-weight"


def streamed_state_is_sharded(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Files hold the state of the distributed optimizer's shards, and nobody else's."""
    if not config.offload.stream_optimizer_state_to_disk:
        return []
    reasons = {
        "--use-precision-aware-optimizer": (
            args.use_precision_aware_optimizer,
            "holds master weights and moments itself, on the device",
        ),
        "--optimizer-cpu-offload": (
            args.optimizer_cpu_offload,
            "holds the state in host memory",
        ),
        "without --use-distributed-optimizer": (
            not args.use_distributed_optimizer,
            "every rank would write the whole state",
        ),
    }
    return [
        Problem(_STREAM, True, f"{flag}: {reason}; leave one of them out")
        for flag, (given, reason) in reasons.items()
        if given
    ]


def master_weights_stand_alone(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """Parameters are made anew from master weights that are tensors of their own."""
    if not config.offload.rematerialize_param_from_master_weight:
        return []
    if not args.use_precision_aware_optimizer or args.optimizer_cpu_offload:
        return []
    reason = (
        "--use-precision-aware-optimizer on the device keeps master weights inside of the "
        "optimizer, as 16-bit remainders of the parameters in Transformer Engine's: nothing is "
        "left to make them from; leave one of them out, or add --optimizer-cpu-offload"
    )
    return [Problem(_REBUILD, True, reason)]


def buffers_can_leave(args: argparse.Namespace, config: MilesConfig) -> list[Problem]:
    """A sleeping trainer gives the memory of parameters and gradients back to the device."""
    if not (config.offload.offload_train and args.nccl_ub):
        return []
    reason = (
        "the memory that NCCL has registered stays with the process, while --offload-train is to "
        "leave it to the engines; leave one of them out"
    )
    return [Problem("--use-nccl-ub", True, reason)]


OFFLOAD_RULES = (streamed_state_is_sharded, master_weights_stand_alone, buffers_can_leave)
