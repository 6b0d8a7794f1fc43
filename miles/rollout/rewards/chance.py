"""Rewards that do not look at the answer: for trying out a set-up."""

import hashlib
import random

from miles.config.root import MilesConfig
from miles.contracts.types import Sample


def random_reward(sample: Sample, answer: str, config: MilesConfig) -> float:
    """0 or 1 with equal chance, another one in each run."""
    return float(random.SystemRandom().getrandbits(1))


def deterministic_random(sample: Sample, answer: str, config: MilesConfig) -> float:
    """0 or 1 by the first byte of SHA-256 over token ids and response: equal samples, equal
    rewards."""
    text = str(sample.tokens) + sample.response
    return float(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % 2)
