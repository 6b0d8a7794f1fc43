"""What is worth saying of a config in which nothing is wrong."""

from miles.config.messages import Message, note
from miles.config.root import MilesConfig
from miles.config.rules.resolve import samples_per_rollout


def notes(config: MilesConfig) -> list[Message]:
    """Of a resolved config that passed its checks."""
    return [*last_step_takes_the_remainder(config), *sleep_has_little_to_free(config)]


def last_step_takes_the_remainder(config: MilesConfig) -> list[Message]:
    """--global-batch-size need not divide the rollout."""
    samples, batch = samples_per_rollout(config), config.data.global_batch_size
    if samples is None or batch is None or samples % batch == 0:
        return []
    whole, rest = divmod(samples, batch)
    steps = "1 step" if whole == 1 else f"{whole} steps"
    return [
        note(
            f"--global-batch-size {batch} does not divide the {samples} samples of a rollout "
            f"(--rollout-batch-size x --n-samples-per-prompt): {steps} of {batch} samples, and a "
            f"last one of {rest}"
        )
    ]


def sleep_has_little_to_free(config: MilesConfig) -> list[Message]:
    """--fsdp-cpu-offload has taken from the device what --offload-train is there for."""
    if not (config.fsdp.fsdp_cpu_offload and config.offload.offload_train):
        return []
    return [
        note(
            "--fsdp-cpu-offload keeps parameters, gradients and optimizer state in host memory: "
            "the trainer still leaves the device while engines generate (--offload-train), but "
            "has only buffers, gathered parameters and cached memory to free there"
        )
    ]
