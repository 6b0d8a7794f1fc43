"""The chain_sum reward."""

import pytest

from miles.config.root import MilesConfig
from miles.contracts.types import Prompt, Sample
from scripts.chain_sum import last_number, reward


def score(response: str, label: str) -> float:
    prompt = Prompt(group_id=0, text="", tokens=(), label=label)
    return reward(Sample(prompt=prompt, index=0, tokens=[], response=response), MilesConfig())


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("7", "7"),
        ("The final answer is 7.<|im_end|>", "7"),
        ("4 + 3 = 7", "7"),
        ("5 - 9 = -4.", "-4"),
        ("5-9=-4", "-4"),
        ("It is 1,234.", "1234"),
        ("7.0", "7"),
        ("007", "7"),
    ],
)
def test_a_response_that_ends_on_the_answer_is_right(response: str, label: str) -> None:
    assert score(response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("", "7"),
        ("seven", "7"),
        ("The answer is 7, or 8.", "7"),
        ("7 = 4 + 3", "7"),
        ("17", "7"),
        ("7.5", "7"),
        ("0.7", "7"),
        ("4", "-4"),
        ("-4", "4"),
        ("1 2 3 4 5 6 7 8 9", "7"),
    ],
)
def test_any_other_response_is_wrong(response: str, label: str) -> None:
    assert score(response, label) == 0.0


def test_the_dash_between_two_numbers_is_no_sign() -> None:
    assert last_number("9-5") == 5.0
    assert last_number("9 -5") == -5.0
