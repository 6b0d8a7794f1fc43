"""User code that fails, for tests."""

from miles.contracts.hooks import GenerateContext, RolloutContext
from miles.contracts.types import Prompt, Sample
from miles.rollout.generate import generate


async def fail_in_the_second_rollout(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    if not context.evaluation and prompt.group_id >= 4:
        raise RuntimeError("the tool server is gone")
    return await generate(prompt, context)


async def fail_to_evaluate(rollout_id: int, context: RolloutContext) -> dict[str, float]:
    raise RuntimeError("the judge is gone")
