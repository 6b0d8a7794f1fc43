"""Command lines that train with Megatron, and what becomes of them."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.backends.megatron_utils import arguments
from miles.config.errors import ConfigError
from miles.utils.arguments import read_config

Line = Callable[..., list[str]]


def make_line(model: Path, folder: Path) -> Line:
    """A function that makes a valid command line with two trainer ranks, plus arguments."""
    prompts = folder / "train.jsonl"
    prompts.write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")

    def make(*more: str) -> list[str]:
        return [
            *("--actor-num-gpus-per-node", "2"),
            *("--hf-checkpoint", str(model), "--prompt-data", str(prompts)),
            *("--label-key", "label", "--rm-type", "math"),
            *("--num-rollout", "5", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "8", "--rollout-num-gpus", "1"),
            *more,
        ]

    return make


def problems(argv: list[str]) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read_config(argv)
    return {problem.flag: problem.remedy for problem in error.value.problems}


def in_a_trainer(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, world_size: int = 2
) -> argparse.Namespace:
    config, _ = read_config(argv)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return arguments.parse(config)
