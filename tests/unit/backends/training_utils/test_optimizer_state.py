"""Whether a run may read the moments of a checkpoint."""

import logging
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils import optimizer_state
from miles.backends.training_utils.optimizer_state import KEY, described
from miles.config.errors import ConfigError

STEP = Path("run/iter_0000003")
WIDE = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
NARROW = {**WIDE, "exp_avg": torch.bfloat16}
FP32 = described(WIDE, streamed=False)


def test_moments_of_the_same_dtype_are_read() -> None:
    optimizer_state.check(STEP, {KEY: FP32, "iteration": 3}, FP32, convert=False)


def test_a_checkpoint_that_does_not_say_is_read() -> None:
    optimizer_state.check(STEP, {"iteration": 3}, FP32, convert=False)


def test_another_dtype_is_refused_with_the_flag_that_allows_it() -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer_state.check(
            STEP, {KEY: FP32, "iteration": 3}, described(NARROW, streamed=True), convert=False
        )
    (problem,) = caught.value.problems
    assert (problem.flag, problem.value) == ("--load", "run")
    assert "step 3 was saved with moments in float32" in problem.remedy
    assert "bfloat16 (exp_avg), float32 (exp_avg_sq)" in problem.remedy
    assert "--convert-optimizer-state" in problem.remedy


def test_what_is_converted_and_what_moves_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="miles")
    own = described(NARROW, streamed=True)
    optimizer_state.check(STEP, {KEY: FP32, "iteration": 3}, own, convert=True)
    assert "moments are converted: saved in float32" in caplog.text
    assert "kept on the device, and is now on disk" in caplog.text
