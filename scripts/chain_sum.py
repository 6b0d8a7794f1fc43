"""The SmolLM2 recipe's reward: is the number a response ends on the right one?"""

import re

from miles.config.root import MilesConfig
from miles.contracts.types import Sample

NUMBER = re.compile(r"(?<![\d.,])-?\d(?:[\d,]*\d)?(?:\.\d+)?")
"""A number, and its minus where that is a sign: the dash of ``5-3`` is none."""


def reward(sample: Sample, config: MilesConfig) -> float:
    """1 when the last number of the response equals the label, else 0.

    The last one, so that listing numbers or repeating the question earns nothing.
    """
    del config
    number = last_number(sample.response)
    return float(number is not None and number == float(str(sample.prompt.label)))


def last_number(text: str) -> float | None:
    """The last number in ``text``, thousands separators left out; ``None`` without one."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
