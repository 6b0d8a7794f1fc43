"""Text to typed values."""

from typing import Any, Literal

import pytest

from miles.config.values import Invalid, convert, convert_items, did_you_mean, split_address

Word = Literal["grpo", "gspo"]


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "-1", -1),
        (int | None, "12", 12),
        (float, "-1e-5", -1e-5),
        (float, "3", 3.0),
        (str, "a b", "a b"),
        (Word, "gspo", "gspo"),
        (Word | None, "grpo", "grpo"),
        (dict[str, Any], '{"a": {"b": 1}}', {"a": {"b": 1}}),
        (int, "9" * 18, 999_999_999_999_999_999),
    ],
)
def test_a_text_of_the_right_form_is_converted(annotation: Any, text: str, value: object) -> None:
    converted = convert(annotation, text)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "says"),
    [
        (int, "1.0", "whole number"),
        (int, "1e3", "whole number"),
        (int, "1_000", "whole number"),
        (int, "", "whole number"),
        (int, "true", "whole number"),
        (int, "9" * 19, "at most 18"),
        (int, "1" * 5000, "at most 18"),
        (float, "nan", "finite"),
        (float, "-inf", "finite"),
        (float, "1e999", "finite"),
        (float, "fast", "a number"),
        (str, "", "empty"),
        (Word, "grop", "choose from grpo, gspo. did you mean grpo?"),
        (dict[str, Any], "[1]", "JSON object"),
        (dict[str, Any], "{a: 1}", "JSON object"),
        (dict[str, Any], '{"a": NaN}', "NaN"),
        (dict[str, Any], '{"a": ' * 3000 + "1" + "}" * 3000, "nested deeper than 100 levels"),
        (dict[str, Any], '{"a": ' + "[" * 100 + "]" * 100 + "}", "nested deeper than 100 levels"),
    ],
)
def test_any_other_text_is_invalid_with_the_reason(annotation: Any, text: str, says: str) -> None:
    converted = convert(annotation, text)
    assert isinstance(converted, Invalid)
    assert says in converted.remedy


def test_items_are_converted_each_and_the_first_bad_one_is_named() -> None:
    assert convert_items(tuple[int, ...], ["1", "-2"]) == (1, -2)
    assert convert_items(tuple[int, ...], ["1", "x", "y"]).value == "x"


def test_near_words_are_suggested_and_far_ones_are_not() -> None:
    assert did_you_mean("--colocte", ["--colocate", "--save"]) == "did you mean --colocate?"
    assert did_you_mean("--zzz", ["--colocate", "--save"]) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:30000", ("10.0.0.1", 30000)),
        ("node-1.example.org:1", ("node-1.example.org", 1)),
        ("[fd00::1]:65535", ("[fd00::1]", 65535)),
        ("http://10.0.0.1:30000", None),
        ("10.0.0.1", None),
        ("10.0.0.1:0", None),
        ("10.0.0.1:65536", None),
        ("fd00::1:30000", None),
        (":30000", None),
        ("a:1/", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: tuple[str, int] | None) -> None:
    assert split_address(text) == expected


def test_a_slip_in_a_synonym_leads_to_the_word_that_it_stands_for() -> None:
    synonyms = {"--learning-rate": "--lr", "--actor-learning-rate": "--lr"}
    for word in ("--learning-rate", "--leraning-rate"):
        assert did_you_mean(word, ["--lr", "--save"], synonyms) == "did you mean --lr?"
