"""What the rollout manager takes from the user's functions and sends to engines, and how epochs
become rollouts."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.backends.training_utils import checkpoints
from miles.config.errors import ConfigError
from miles.contracts.engine import EngineError, GenerateRequest, SamplingParams
from miles.core import hf
from miles.ray.rollout.manager import STATE_FILE, RolloutManager, numbers, with_num_rollout
from tests.unit.rollout.scripted import made_config


@pytest.mark.parametrize("returned", [None, [1.0], {"a": None}, {"a": "many"}])
def test_metrics_that_are_no_numbers_are_refused_with_the_function_named(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"--eval-function-path must return metrics"):
        numbers(returned, "--eval-function-path")


def test_metrics_of_any_number_type_become_floats() -> None:
    assert numbers({"a": np.float32(0.5), "b": True, "c": 2}, "") == {"a": 0.5, "b": 1.0, "c": 2.0}


@pytest.mark.parametrize(
    ("num_prompts", "num_epoch", "batch", "expected"),
    [(10, 1, 4, 2), (10, 2, 4, 5), (3, 1, 4, 1), (1000, 3, 128, 23)],
)
def test_epochs_become_whole_rollouts(
    num_prompts: int, num_epoch: int, batch: int, expected: int
) -> None:
    config = made_config(num_epoch=num_epoch, rollout_batch_size=batch)
    assert with_num_rollout(config, num_prompts).data.num_rollout == expected


def test_a_given_number_of_rollouts_stays() -> None:
    assert with_num_rollout(made_config(num_rollout=7), 1000).data.num_rollout == 7


def test_a_damaged_position_in_the_data_is_refused_with_its_file(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    checkpoints.prepare_staging(tmp_path, 3, [])
    position = checkpoints.staging_dir(tmp_path, 3) / STATE_FILE
    position.write_bytes(bytes(40))
    step = checkpoints.publish(tmp_path, 3, {"backend": "fsdp"})
    manager = RolloutManager(made_config(hf_checkpoint=str(tiny_qwen3)))
    told = f"--load = .*step 3: {step / STATE_FILE} is damaged"
    with pytest.raises(ConfigError, match=told):
        asyncio.run(manager.load(str(step)))


def test_ids_that_the_model_does_not_have_are_sent_to_no_engine(tiny_qwen3: Path) -> None:
    manager = RolloutManager(made_config(hf_checkpoint=str(tiny_qwen3)))
    beyond = hf.read_config(str(tiny_qwen3))["vocab_size"]
    params = SamplingParams(max_new_tokens=1)
    with pytest.raises(EngineError, match=f"^{beyond} is not a token id"):
        asyncio.run(manager._pool.generate(GenerateRequest(input_ids=[0, beyond], params=params)))
