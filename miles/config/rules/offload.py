"""What sleeping, streaming and rematerializing need of each other, checked after derivation."""

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem


def offload_needs_colocation(config: MilesConfig, given: Given) -> list[Problem]:
    """Nobody has to leave a device that is not shared."""
    if config.cluster.colocate:
        return []
    offload, external = config.offload, config.rollout.rollout_external
    asked = (
        ("offload_train", offload.offload_train),
        # Of engines launched elsewhere another rule speaks.
        ("offload_rollout", offload.offload_rollout and not external),
    )
    remedy = "applies only with --colocate: without it, trainer and engines share no device"
    return [problem(config, dest, remedy=remedy) for dest, value in asked if value]


def parameters_come_back_from_host_memory(config: MilesConfig, given: Given) -> list[Problem]:
    """What is made from master weights spares the copy in host memory, of Megatron alone."""
    offload, flag = config.offload, "rematerialize_param_from_master_weight"
    if not offload.rematerialize_param_from_master_weight:
        return []
    problems: list[Problem] = []
    if offload.offload_train_target == "disk":
        remedy = "what it spares is host memory, and with the disk there is no copy: leave one out"
        problems.append(problem(config, flag, "offload_train_target", remedy=remedy))
    if config.cluster.train_backend == "fsdp":
        remedy = "this backend's parameters are the master weights: there is no copy to leave out"
        problems.append(problem(config, flag, remedy=remedy))
    if config.precision.fp32:
        remedy = "with --fp32 the parameters are the master weights: there is no copy to leave out"
        problems.append(problem(config, flag, "fp32", remedy=remedy))
    return problems


def streamed_state_is_fp32(config: MilesConfig, given: Given) -> list[Problem]:
    """Masters on disk are fp32; without them FSDP trains the narrow parameters themselves."""
    streams = config.offload.stream_optimizer_state_to_disk
    if not streams or config.cluster.train_backend != "fsdp" or config.fsdp.keep_fp32_master:
        return []
    remedy = "streams the state of fp32 master weights: leave out --no-keep-fp32-master"
    return [problem(config, "stream_optimizer_state_to_disk", "keep_fp32_master", remedy=remedy)]


def streamed_state_is_saved_at_rest(config: MilesConfig, given: Given) -> list[Problem]:
    """The next step writes over the files that a save in the background would still read."""
    if not (config.offload.stream_optimizer_state_to_disk and config.checkpoint.async_save):
        return []
    remedy = "the next step would change the files while they are saved: leave out --async-save"
    return [problem(config, "stream_optimizer_state_to_disk", "async_save", remedy=remedy)]


def state_is_on_the_device(config: MilesConfig, given: Given) -> list[Problem]:
    """With --fsdp-cpu-offload there is nothing to bring to a disk from the device."""
    offload = config.offload
    on_disk = offload.offload_train and offload.offload_train_target == "disk"
    if not config.fsdp.fsdp_cpu_offload or not on_disk:
        return []
    remedy = "keeps the state in host memory always, and none on the device: leave one of them out"
    return [problem(config, "fsdp_cpu_offload", "offload_train_target", remedy=remedy)]


OFFLOAD_CHECKS: tuple[Check, ...] = (
    offload_needs_colocation,
    parameters_come_back_from_host_memory,
    streamed_state_is_fp32,
    streamed_state_is_saved_at_rest,
    state_is_on_the_device,
)
