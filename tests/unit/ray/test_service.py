"""Whose code runs in the manager's process."""

from dataclasses import replace

from miles.config.hooks import HooksConfig
from miles.config.root import MilesConfig
from miles.ray.rollout.service import IN_TRAINERS, user_code


def test_the_users_functions_are_named_by_their_flags() -> None:
    hooks = HooksConfig(
        custom_rm_path="mine.reward",
        custom_generate_function_path="miles.rollout.multi_turn.generate",
        generate_execute_tool_function_path="mine.tool",
        custom_loss_function_path="mine.loss",
    )
    assert user_code(replace(MilesConfig(), hooks=hooks)) == [
        "--generate-execute-tool-function-path mine.tool",
        "--custom-rm-path mine.reward",
    ]
    assert user_code(MilesConfig()) == []


def test_hooks_of_the_trainer_are_hooks() -> None:
    assert set(IN_TRAINERS) <= set(vars(HooksConfig()))
