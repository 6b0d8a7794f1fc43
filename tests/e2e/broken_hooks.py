"""User code that fails or does harm, for tests."""

import os
import resource
import time
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from miles.backends.training_utils.checkpoints import read_tracker
from miles.backends.training_utils.losses import policy_loss
from miles.config.root import MilesConfig
from miles.contracts.hooks import GenerateContext, LossScale, RolloutContext
from miles.contracts.types import LossOutput, MicroBatch, Prompt, Sample, TokenStats
from miles.rollout.generate import generate


async def fail_in_the_second_rollout(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    if not context.evaluation and prompt.group_id >= 4:
        raise RuntimeError("the tool server is gone")
    return await generate(prompt, context)


def end_the_process(sample: Sample, config: MilesConfig) -> float:
    os._exit(3)


async def fail_to_evaluate(rollout_id: int, context: RolloutContext) -> dict[str, float]:
    raise RuntimeError("the judge is gone")


def kill_the_engines_after_the_second_rollout(
    samples: list[Sample], raw_rewards: NDArray[np.float32], config: MilesConfig
) -> NDArray[np.float32]:
    """When every response is there, before the batch goes to the trainer."""
    if min(sample.group_id for sample in samples) == 4:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if config.rollout.hf_checkpoint in command and "--model-path" in command:
                process.kill()
                _wait_until_ended(process)
    return raw_rewards


def _wait_until_ended(process: psutil.Process, timeout_s: float = 30.0) -> None:
    """On a busy machine a killed process closes its sockets late. Its parent alone reaps it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.05)


def ask_for_a_save_in_every_rollout(
    samples: list[Sample], raw_rewards: NDArray[np.float32], config: MilesConfig
) -> NDArray[np.float32]:
    """In its middle, before it is trained; fails if the file of the last one is still there."""
    sentinel = config.checkpoint.save_trigger_sentinel
    assert sentinel is not None
    Path(sentinel).touch(exist_ok=False)
    return raw_rewards


def no_file_grows_after_the_first_checkpoint(
    batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig
) -> LossOutput:
    """The usual loss; writing more than 30 kB to a file raises ``OSError`` on this rank then."""
    save = config.checkpoint.save
    assert save is not None
    if read_tracker(save) == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    return policy_loss(batch, stats, scale, config)
