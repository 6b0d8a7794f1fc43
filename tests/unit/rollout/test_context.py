"""What a request may have under the engine's context, which SGLang serves not to its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.contracts.types import Status
from miles.core import hf
from miles.rollout.context import with_context_length
from tests.unit.rollout.scripted import ScriptedEngines, made_config
from tests.unit.rollout.test_generate import context_of, partial_sample, run


def limit_of(model: Path, unserved: int, **flags: Any) -> int | None:
    config = made_config(hf_checkpoint=str(model), **flags)
    return with_context_length(config, unserved).rollout.rollout_max_context_len


def test_the_bound_is_the_least_of_flag_and_what_the_engine_serves(tiny_qwen3: Path) -> None:
    length = hf.context_length(hf.load_config(str(tiny_qwen3)))
    assert length is not None
    assert limit_of(tiny_qwen3, 0) == length
    assert limit_of(tiny_qwen3, 6) == length - 6
    assert limit_of(tiny_qwen3, 6, rollout_max_context_len=length) == length - 6
    assert limit_of(tiny_qwen3, 6, rollout_max_context_len=100) == 100
    assert limit_of(tiny_qwen3, 6, sglang_context_length=50) == 44


@pytest.mark.parametrize(("response", "asked"), [("x" * 7, True), ("x" * 8, False)])
def test_an_input_that_the_engine_refuses_is_truncated_instead_of_asked_for(
    tokenizer: Any, tiny_qwen3: Path, response: str, asked: bool
) -> None:
    """A context of 17 of which 6 are not served: inputs of 11 tokens are refused."""
    engines = ScriptedEngines(tokenizer, lambda text, request: "x" * 20)
    context = context_of(engines, rollout_max_response_len=100)
    bounded = made_config(
        hf_checkpoint=str(tiny_qwen3),
        n_samples_per_prompt=1,
        rollout_max_response_len=100,
        sglang_context_length=17,
    )
    unfinished = partial_sample(tokenizer, response, Status.ABORTED)
    context = replace(context, config=with_context_length(bounded, 6), unfinished=(unfinished,))
    (sample,) = run(engines, context)
    assert sample.status is Status.TRUNCATED
    assert [len(r.input_ids) for r in engines.requests] == ([10] if asked else [])
    assert [r.params.max_new_tokens for r in engines.requests] == ([1] if asked else [])
