"""User code that fails or does harm, for tests."""

import numpy as np
import psutil
from numpy.typing import NDArray

from miles.config.root import MilesConfig
from miles.contracts.hooks import GenerateContext, RolloutContext
from miles.contracts.types import Prompt, Sample
from miles.rollout.generate import generate


async def fail_in_the_second_rollout(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    if not context.evaluation and prompt.group_id >= 4:
        raise RuntimeError("the tool server is gone")
    return await generate(prompt, context)


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
    return raw_rewards
