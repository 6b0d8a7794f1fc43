"""The environment of NCCL that a trainer and its engines share: with different ones the first
broadcast of weights hangs."""

from collections.abc import Sequence

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem

CUMEM = "NCCL_CUMEM_ENABLE"
"""SGLang takes the environment's, but 1 for its symmetric memory and 0 where none is given."""


def nccl_environment(sglang_argv: Sequence[str]) -> dict[str, str]:
    """Variables of every trainer and engine process."""
    return {CUMEM: str(int("--enable-symm-mem" in sglang_argv))}


def check(config: MilesConfig, sglang_argv: Sequence[str]) -> list[Problem]:
    """``--train-env-vars`` that contradict it. Engines launched elsewhere have an environment of
    their own, which the trainer's may have to be like."""
    given = config.cluster.train_env_vars.get(CUMEM)
    needed = nccl_environment(sglang_argv)[CUMEM]
    if given is None or given == needed or config.rollout.rollout_external:
        return []
    why = "with --sglang-enable-symm-mem" if needed == "1" else "without --sglang-enable-symm-mem"
    remedy = (
        f"{CUMEM} is {needed} in the engines {why}, and the first broadcast of weights to them "
        "hangs with another value in the trainer; leave it out"
    )
    return [problem(config, "train_env_vars", remedy=remedy)]
