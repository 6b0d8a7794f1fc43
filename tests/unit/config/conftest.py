"""Configs from command lines."""

from collections.abc import Callable

import pytest

from miles.config.command_line import read_command_line
from miles.config.root import MilesConfig
from miles.config.rules import resolve

Resolved = Callable[..., tuple[MilesConfig, frozenset[str]]]

VALID = (
    *("--train-backend", "fsdp", "--hf-checkpoint", "model", "--prompt-data", "train.jsonl"),
    *("--rm-type", "math", "--num-rollout", "2", "--rollout-batch-size", "4"),
    *("--n-samples-per-prompt", "2", "--rollout-max-response-len", "8", "--rollout-num-gpus", "1"),
)


@pytest.fixture
def resolved() -> Resolved:
    """A resolved config and the fields given: ``VALID``, less ``without``, plus arguments."""

    def make(*argv: str, without: tuple[str, ...] = ()) -> tuple[MilesConfig, frozenset[str]]:
        pairs = zip(VALID[::2], VALID[1::2], strict=True)
        base = [word for flag, value in pairs if flag not in without for word in (flag, value)]
        line = read_command_line([*base, *argv])
        assert not line.problems
        assert not line.foreign
        return resolve(line.config)[0], line.given

    return make
