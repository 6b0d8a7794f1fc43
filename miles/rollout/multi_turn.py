"""One prompt to a group of samples by turns: the assistant calls tools until it does not.

A conversation's token ids are those of the chat template with what the assistant wrote in place:
sampled tokens stay as they are, and what the template puts between two turns (end token, tool
messages, the next generation prompt) is appended with loss mask 0 and log-prob 0.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.contracts.hooks import GenerateContext, load_hook
from miles.contracts.types import Message, Prompt, Sample, Status
from miles.rollout.chat_template import ChatTemplate, ChatTemplateError, assistant_marker
from miles.rollout.generate import (
    extend_samples,
    is_open,
    response_text,
    run_together,
    start_samples,
    tokens_left,
)
from miles.rollout.user_call import call_bounded

STATE_KEY = "multi_turn"
"""Where a sample's metadata keeps its conversation, so that an aborted one can go on."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

ExecuteTool = Callable[..., Any]


def check(config: MilesConfig) -> list[Problem]:
    """What the multi-turn generate function lacks, when it is the one in use."""
    path = config.hooks.custom_generate_function_path
    if path is None or path.replace(":", ".") != f"{__name__}.{generate.__name__}":
        return []
    problems = list[Problem]()
    if config.hooks.generate_execute_tool_function_path is None:
        flag = "--generate-execute-tool-function-path"
        problems.append(Problem(flag, None, "multi-turn generation needs it, to run tool calls"))
    if not config.data.apply_chat_template:
        remedy = "multi-turn generation needs it: tool messages are rendered by the template"
        problems.append(Problem("--apply-chat-template", False, remedy))
    if config.rollout.deterministic_rollout:
        remedy = (
            "how long tools take decides which later turns an engine has in one batch, and so the "
            "last bits of their log-probs; leave one out"
        )
        dests = ("deterministic_rollout", "custom_generate_function_path")
        problems.append(problem(config, *dests, remedy=remedy))
    return problems


async def generate(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Answer a prompt ``context.num_samples`` times with tools.

    A sample ends completed when a turn calls no tool, truncated when ``--generate-max-turns`` or
    the token limits end it. ``--rollout-max-response-len`` bounds the whole response, tool
    messages included; tool messages that do not fit are left out and end it.
    """
    if prompt.messages is None:
        raise ValueError("the multi-turn generate function needs --apply-chat-template")
    hooks = context.config.hooks
    execute = load_hook(
        "generate_execute_tool_function_path", hooks.generate_execute_tool_function_path
    )
    if execute is None:
        raise ValueError("the multi-turn generate function needs an execute-tool function")
    template = ChatTemplate(
        tokenizer=context.tokenizer, kwargs=context.config.data.apply_chat_template_kwargs
    )
    samples = start_samples(prompt, context)
    talks = [_Conversation(s, prompt.messages, template, execute) for s in samples]
    fresh = [talk for talk in talks if is_open(talk.sample) and not talk.sample.response_length]
    if fresh:
        # The first turns start from equal tokens: one request, one prefill.
        first_turns = [talk.sample for talk in fresh]
        await extend_samples(first_turns, context, admission=context.admission)
        for talk in fresh:
            talk.sampled = True
    await run_together(_converse(talk, context) for talk in talks)
    for sample in samples:
        if not is_open(sample):
            del sample.metadata[STATE_KEY]
    return samples


@dataclass
class _Conversation:
    """A sample, and the messages behind its tokens (markers stand for assistant turns)."""

    sample: Sample
    start: tuple[Message, ...]
    template: ChatTemplate
    execute: ExecuteTool
    sampled: bool = False
    """The current turn has just been sampled."""

    def __post_init__(self) -> None:
        self.sample.metadata.setdefault(STATE_KEY, {"messages": [], "turn_start": 0, "turn": 0})

    @property
    def state(self) -> dict[str, Any]:
        return self.sample.metadata[STATE_KEY]

    @property
    def messages(self) -> list[Message]:
        return [*self.start, *self.state["messages"]]

    def turn_tokens(self) -> list[int]:
        prompt_length = len(self.sample.tokens) - self.sample.response_length
        return self.sample.tokens[prompt_length + self.state["turn_start"] :]


async def _converse(talk: _Conversation, context: GenerateContext) -> None:
    sample = talk.sample
    while talk.sampled or is_open(sample):
        if not talk.sampled:
            turn, start = talk.state["turn"], talk.state["turn_start"]
            await extend_samples([sample], context, turn=turn, turn_start=start)
        talk.sampled = False
        if sample.status is not Status.COMPLETED:
            return
        text = context.tokenizer.decode(talk.turn_tokens(), skip_special_tokens=False)
        calls = _TOOL_CALL.findall(text)
        if not calls:
            return
        if talk.state["turn"] + 1 >= context.config.rollout.generate_max_turns:
            sample.status = Status.TRUNCATED
            return
        # One after the other: a later call may need what an earlier one did.
        results = [await _run_tool(call, talk, context) for call in calls]
        _append_messages(talk, results, context)


async def _run_tool(call: str, talk: _Conversation, context: GenerateContext) -> Message:
    """The tool's answer as a message; what goes wrong is told to the model as its answer."""
    try:
        name, arguments = parse_tool_call(call)
    except ValueError as error:
        return {"role": "tool", "name": "", "content": f"Error: {error}"}
    timeout_s = context.config.rollout.generate_tool_timeout_s
    metadata = talk.sample.prompt.metadata
    running = asyncio.ensure_future(
        call_bounded(talk.execute, name, arguments, metadata, timeout_s=timeout_s)
    )
    (answer,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(answer, Exception):
        answer = f"Error: {type(answer).__name__}: {answer}"
    elif isinstance(answer, BaseException):
        raise answer
    elif not isinstance(answer, str):
        answer = f"Error: the tool returned {type(answer).__name__} instead of text"
    return {"role": "tool", "name": name, "content": answer}


def parse_tool_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of ``{"name": ..., "arguments": {...}}``.

    Raises ``ValueError`` whose text tells the model what is wrong.
    """
    try:
        call = json.loads(text)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except json.JSONDecodeError as error:
        raise ValueError(f"the tool call is not JSON: {error}") from error
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a tool call is {"name": "...", "arguments": {...}}')
    return call["name"], arguments


def _append_messages(talk: _Conversation, results: list[Message], context: GenerateContext) -> None:
    """Append tool messages and the next generation prompt, or end the sample when they do not fit.

    Raises ``ChatTemplateError`` when the template would change what is already there.
    """
    sample, before = talk.sample, talk.messages
    tools = sample.prompt.tools
    marker = assistant_marker(len(before))
    so_far = talk.template.render(before, tools, generation_prompt=True) + marker["content"]
    after = [*before, marker, *results]
    whole = talk.template.render(after, tools, generation_prompt=True)
    if not whole.startswith(so_far):
        raise ChatTemplateError(
            f"the chat template of {context.config.rollout.hf_checkpoint} changes earlier text "
            "when a turn is added (it rewrites history, say), so a conversation cannot grow by "
            "turns; give one that only appends with --chat-template-path"
        )
    tokens = talk.template.encode(whole[len(so_far) :])
    if tokens and tokens[0] == sample.tokens[-1]:
        del tokens[0]  # the turn's end token, which the policy wrote itself
    if len(tokens) >= tokens_left(sample, context):
        sample.status = Status.TRUNCATED
        return
    sample.tokens += tokens
    sample.response_length += len(tokens)
    sample.loss_mask += [0] * len(tokens)
    sample.rollout_log_probs += [0.0] * len(tokens)
    sample.response = response_text(sample, context)
    sample.status = Status.PENDING
    sample.metadata[STATE_KEY] = {
        "messages": [*talk.state["messages"], marker, *results],
        "turn_start": sample.response_length,
        "turn": talk.state["turn"] + 1,
    }
