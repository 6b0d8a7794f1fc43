import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from miles.contracts.engine import GenerateRequest
from miles.contracts.hooks import GenerateContext
from miles.contracts.types import Prompt, Sample, Status
from miles.rollout.chat_template import ChatTemplateError
from miles.rollout.multi_turn import check, generate, parse_tool_call
from miles.rollout.steps import sampling_params, seeded
from scripts.made_models import make_tokenizer
from tests.unit.rollout.scripted import ScriptedEngines, made_config, made_prompt
from tests.unit.rollout.test_chat_mask import APPEND_ONLY

HERE = "tests.unit.rollout.test_multi_turn"
USER = {"role": "user", "content": "2*3, 4*5"}
TWO_CALLS = (
    'so <tool_call>{"name": "mul", "arguments": {"a": 2, "b": 3}}</tool_call>'
    '<tool_call>{"name": "mul", "arguments": {"a": 4, "b": 5}}</tool_call><|im_end|>'
)


def multiply(name: str, arguments: dict[str, Any], metadata: Mapping[str, Any]) -> str:
    if name == "sleep":
        time.sleep(2.0)
    if name == "none":
        return None  # pyright: ignore[reportReturnType]
    return str(arguments["a"] * arguments["b"])


async def multiply_async(name: str, arguments: dict[str, Any], metadata: Mapping[str, Any]) -> str:
    return multiply(name, arguments, metadata)


def tokenizer_with(template: str) -> Any:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def prompt_of(tokenizer: Any, tools: tuple[dict[str, Any], ...] | None = None) -> Prompt:
    text = tokenizer.apply_chat_template(
        [USER], tools=tools, tokenize=False, add_generation_prompt=True
    )
    return made_prompt(0, tokenizer, text, messages=(USER,), tools=tools)


def context_of(engines: ScriptedEngines, **changes: Any) -> GenerateContext:
    changes.setdefault("generate_execute_tool_function_path", f"{HERE}.multiply")
    changes.setdefault("rollout_max_response_len", 400)
    config = made_config(**changes)
    return GenerateContext(
        config=config,
        engines=engines,
        tokenizer=engines.tokenizer,
        params=sampling_params(config, evaluation=False),
        num_samples=config.data.n_samples_per_prompt,
        evaluation=False,
        first_index=0,
    )


def run(
    answer: Callable[[str, GenerateRequest], str | None],
    template: str = APPEND_ONLY,
    tools: tuple[dict[str, Any], ...] | None = None,
    **changes: Any,
) -> tuple[list[Sample], ScriptedEngines]:
    engines = ScriptedEngines(tokenizer_with(template), answer)
    prompt = prompt_of(engines.tokenizer, tools)
    return asyncio.run(generate(prompt, context_of(engines, **changes))), engines


def two_calls_then_answer(text: str, request: GenerateRequest) -> str:
    return "it is 6 and 20<|im_end|>" if "tool_response" in text else TWO_CALLS


def trained_text(sample: Sample, engines: ScriptedEngines) -> str:
    response = sample.tokens[-sample.response_length :]
    trained = [t for t, bit in zip(response, sample.loss_mask, strict=True) if bit]
    return engines.tokenizer.decode(trained)


@pytest.mark.parametrize("function", ["multiply", "multiply_async"])
def test_an_assistant_turn_and_two_tool_messages_are_the_template_of_the_whole(
    function: str,
) -> None:
    tools = ({"name": "mul"},)
    samples, engines = run(
        two_calls_then_answer,
        tools=tools,
        generate_execute_tool_function_path=f"{HERE}.{function}",
    )
    whole = [
        USER,
        {"role": "assistant", "content": TWO_CALLS.removesuffix("<|im_end|>")},
        {"role": "tool", "content": "6"},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "it is 6 and 20"},
    ]
    wanted = engines.tokenizer.apply_chat_template(whole, tools=tools, return_dict=False)
    newline = engines.tokenizer.encode("\n")
    for sample in samples:
        sample.validate()
        assert sample.tokens + newline == wanted
        assert trained_text(sample, engines) == TWO_CALLS + "it is 6 and 20<|im_end|>"
        assert sample.status is Status.COMPLETED
        placeholder = [
            log_prob
            for log_prob, bit in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
            if not bit
        ]
        assert set(placeholder) == {0.0}
        assert "multi_turn" not in sample.metadata
    # The first turn of both samples is one request.
    assert [r.n for r in engines.requests] == [2, 1, 1]


def test_a_turn_that_ends_without_its_end_token_gets_it_untrained() -> None:
    def answer(text: str, request: GenerateRequest) -> str:
        call = '<tool_call>{"name": "mul", "arguments": {"a": 1, "b": 1}}</tool_call>'
        return "1<|im_end|>" if "tool_response" in text else call

    samples, engines = run(answer)
    text = engines.tokenizer.decode(samples[0].tokens)
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>1</tool_response>" in text
    assert trained_text(samples[0], engines).count("<|im_end|>") == 1


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"name": "mul", "arguments": {"a": 1}}', "Error: KeyError: 'b'"),
        ('{"name": "sleep", "arguments": {"a": 1, "b": 1}}', "Error: TimeoutError: no answer"),
        ('{"name": "none", "arguments": {}}', "Error: the tool returned NoneType"),
        ('{"name": "mul", ', "Error: the tool call is not JSON"),
        ('{"arguments": {}}', "Error: a tool call is "),
        ("[1]", "Error: a tool call is "),
    ],
)
def test_what_goes_wrong_with_a_tool_is_its_answer(call: str, told: str) -> None:
    def answer(text: str, request: GenerateRequest) -> str:
        return "done<|im_end|>" if "tool_response" in text else f"<tool_call>{call}</tool_call>"

    samples, engines = run(answer, generate_tool_timeout_s=0.2)
    assert f"<tool_response>{told}" in engines.tokenizer.decode(samples[0].tokens)
    assert samples[0].status is Status.COMPLETED


def always_call(text: str, request: GenerateRequest) -> str:
    return TWO_CALLS


def test_the_turns_are_limited() -> None:
    samples, engines = run(always_call, generate_max_turns=3, rollout_max_response_len=2000)
    assert trained_text(samples[0], engines) == TWO_CALLS * 3
    assert samples[0].status is Status.TRUNCATED
    assert samples[0].tokens[-1] == engines.tokenizer.encode("<|im_end|>")[0]


def test_tool_messages_that_do_not_fit_end_the_sample() -> None:
    length = len(make_tokenizer().encode(TWO_CALLS))
    for changes in (
        {"rollout_max_response_len": length + 20},
        {"rollout_max_context_len": length + 60, "rollout_max_response_len": 2000},
    ):
        samples, engines = run(always_call, **changes)
        assert trained_text(samples[0], engines) == TWO_CALLS
        assert samples[0].response_length == length
        assert samples[0].status is Status.TRUNCATED


def test_a_template_that_rewrites_history_is_refused_by_name() -> None:
    rewriting = APPEND_ONLY.replace(
        "{% for message in messages %}", "{{ messages | length }}{% for message in messages %}", 1
    )
    with pytest.raises(ChatTemplateError, match="made-model changes earlier text"):
        run(two_calls_then_answer, template=rewriting)


def test_later_turns_draw_other_noise() -> None:
    engines = ScriptedEngines(tokenizer_with(APPEND_ONLY), two_calls_then_answer)
    context = seeded(context_of(engines, deterministic_rollout=True), 0)
    asyncio.run(generate(prompt_of(engines.tokenizer), context))
    seeds = [seed for r in engines.requests for seed in r.params.sampling_seeds or ()]
    assert len(seeds) == len(set(seeds)) == 4


def test_an_aborted_conversation_goes_on_in_its_turn() -> None:
    engines = ScriptedEngines(
        tokenizer_with(APPEND_ONLY),
        lambda text, request: None if "response" in text else TWO_CALLS,
        partial="it is ",
    )
    context = context_of(engines, n_samples_per_prompt=1)
    prompt = prompt_of(engines.tokenizer)

    async def abort_in_second_turn() -> list[Sample]:
        task = asyncio.ensure_future(generate(prompt, context))
        while len(engines.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        await engines.abort_all()
        return await task

    aborted = asyncio.run(abort_in_second_turn())
    assert aborted[0].status is Status.ABORTED
    engines.answer = lambda text, request: "6 and 20<|im_end|>"
    resumed = asyncio.run(generate(prompt, replace(context, unfinished=tuple(aborted))))
    engines.answer = two_calls_then_answer
    whole = asyncio.run(generate(prompt, context))
    assert resumed[0].tokens == whole[0].tokens
    assert resumed[0].loss_mask == whole[0].loss_mask
    assert resumed[0].status is Status.COMPLETED


def test_arguments_may_be_json_text() -> None:
    assert parse_tool_call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == ("f", {"a": 1})


def test_what_the_function_needs_is_asked_for_when_flags_are_parsed() -> None:
    path = "miles.rollout.multi_turn.generate"
    problems = check(made_config(custom_generate_function_path=path))
    assert [p.flag for p in problems] == [
        "--generate-execute-tool-function-path",
        "--apply-chat-template",
    ]
    assert check(made_config()) == []
    complete = {"generate_execute_tool_function_path": "m.f", "apply_chat_template": True}
    assert check(made_config(custom_generate_function_path=path, **complete)) == []
    again = made_config(custom_generate_function_path=path, deterministic_rollout=True, **complete)
    (found,) = check(again)
    assert found.flag == "--deterministic-rollout, --custom-generate-function-path"
    assert "how long tools take" in found.remedy
