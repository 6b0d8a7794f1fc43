from dataclasses import replace

import pytest

from miles.config.root import MilesConfig
from miles.ray.errors import JobError
from miles.ray.rollout.capacity import check_capacity

URL = "http://10.0.0.7:30000"


def config_of(prompt: int | None, response: int, context: int | None = None) -> MilesConfig:
    config = MilesConfig()
    rollout = replace(
        config.rollout,
        rollout_max_prompt_len=prompt,
        rollout_max_response_len=response,
        rollout_max_context_len=context,
    )
    return replace(config, rollout=rollout)


@pytest.mark.parametrize(
    ("info", "most"),
    [
        ({"engine": "embedded", "max_total_num_tokens": 100}, 100),
        ({"max_total_num_tokens": 100, "page_size": 1}, 94),
        # Of 100 tokens are 6 pages of 16, the last one to be kept free, and a prompt is rounded up.
        ({"max_total_num_tokens": 100, "page_size": 16}, 68),
    ],
)
def test_a_cache_that_cannot_hold_prompt_and_response_is_refused_with_the_flags(
    info: dict[str, object], most: int
) -> None:
    check_capacity(config_of(20, most - 20), URL, info)
    check_capacity(config_of(20, 1000, context=most), URL, info)
    with pytest.raises(JobError, match=rf"{most + 1} tokens, .* {URL} holds {most}; .*fraction"):
        check_capacity(config_of(20, most - 19), URL, info)
    with pytest.raises(JobError, match="--rollout-max-response-len: a prompt"):
        check_capacity(config_of(None, most), URL, info)


def test_prompts_without_a_bound_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    info = {"engine": "embedded", "max_total_num_tokens": 100}
    check_capacity(config_of(None, 60, context=100), URL, info)
    assert not caplog.messages
    check_capacity(config_of(None, 60, context=200), URL, info)
    (message,) = caplog.messages
    assert "prompts of more than 40 get no whole response" in message
