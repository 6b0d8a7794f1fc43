"""Rewards whose graders can hang or eat memory, so that they run in processes of their own."""

from typing import Any

from miles.config.root import MilesConfig
from miles.contracts.types import Sample
from miles.rollout.rewards.answers import label_of
from miles.rollout.rewards.grader_pool import grade


async def math(sample: Sample, answer: str, config: MilesConfig) -> float:
    """1 when math-verify finds the answer equal to the label, else 0."""
    job = {"kind": "math", "answer": answer, "label": label_of(sample)}
    return await grade(job, config.reward.rm_timeout_s)


async def reasoning_gym(sample: Sample, answer: str, config: MilesConfig) -> float:
    """What the task family's grader says: 0 to 1, and 0 when it fails on the answer.

    The answer is what is between the last ``<answer>`` tags, or all of it without such tags. The
    row is one of ``--prompt-data reasoning_gym:...``, or one that keeps the entry's own metadata
    (``source_dataset``) and has its answer as label.
    """
    metadata = sample.prompt.metadata
    job: dict[str, Any] = {"kind": "reasoning_gym", "answer": answer}
    if "reasoning_gym" in metadata:
        job["recipe"] = metadata["reasoning_gym"]
    elif "source_dataset" in metadata:
        messages = sample.prompt.messages
        question = messages[-1]["content"] if messages else sample.prompt.text
        entry = {"question": question, "answer": label_of(sample), "metadata": dict(metadata)}
        job |= {"family": metadata["source_dataset"], "entry": entry}
    else:
        raise ValueError("the row's metadata names no reasoning-gym family (source_dataset)")
    return await grade(job, config.reward.rm_timeout_s)
