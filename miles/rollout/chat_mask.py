"""Token ids and loss mask of a whole conversation, for supervised training on it.

``--loss-mask-type`` names one of three ways:

``qwen``
    The template's rendering of the conversation; every assistant turn trains, its end token
    included. The template must only ever append (a later message changes no earlier text).
``qwen3``
    For templates that drop the thinking of earlier turns: each assistant turn stands as the
    template shows it while it is the newest one, thinking included; every one trains.
``distill_qwen``
    Only the last assistant turn trains, word for word as the data has it, thinking included; what
    is before it is rendered as it is for generation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.contracts.types import Message
from miles.rollout.chat_template import ChatTemplate, ChatTemplateError

Tools = Sequence[Mapping[str, Any]]
Piece = tuple[str, bool]
"""Text, and whether the assistant wrote it."""


def conversation_tokens(
    messages: Sequence[Message],
    tools: Tools | None,
    template: ChatTemplate,
    mask_type: str,
) -> tuple[list[int], list[int]]:
    """Token ids of the conversation and, as long, 1 where the assistant's turns train.

    The assistant's text is encoded apart from what is before it, as it is when it is generated.
    Messages after the last assistant turn are left out: nothing in them trains.
    """
    if mask_type not in MASK_TYPES:
        known = ", ".join(MASK_TYPES)
        raise ValueError(f"--loss-mask-type = {mask_type!r}: there are {known}")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("the conversation has no assistant turn to train on")
    tokens: list[int] = []
    mask: list[int] = []
    for text, by_assistant in MASK_TYPES[mask_type](messages[: turns[-1] + 1], tools, template):
        ids = template.encode(text)
        tokens += ids
        mask += [int(by_assistant)] * len(ids)
    return tokens, mask


def _newest_turns(
    messages: Sequence[Message], tools: Tools | None, template: ChatTemplate
) -> list[Piece]:
    """Each assistant turn as the template shows it while it is the newest."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    start = template.render(messages[: turns[0]], tools, generation_prompt=True)
    pieces: list[Piece] = [(start, False)]
    for i, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        pieces.append((_turn_text(messages[: i + 1], tools, template), True))
        later = messages[i + 1 : following]
        rest = template.after_turn(
            messages[:i], later, tools, generation_prompt=following < len(messages)
        )
        end, rest = _split_end_token(rest, template)
        pieces += [(end, True), (rest, False)]
    return pieces


def _turn_text(messages: Sequence[Message], tools: Tools | None, template: ChatTemplate) -> str:
    """The last message, an assistant's, between the generation prompt and its end token."""
    before = template.render(messages[:-1], tools, generation_prompt=True)
    text = template.render(messages, tools, generation_prompt=False)
    end = template.after_turn(messages[:-1], (), tools, generation_prompt=False)
    if not text.startswith(before) or not text.endswith(end):
        raise ChatTemplateError(
            "the chat template does not show an assistant turn behind its own generation prompt; "
            "give another one with --chat-template-path"
        )
    return text[len(before) : len(text) - len(end)]


def _split_end_token(text: str, template: ChatTemplate) -> tuple[str, str]:
    """The special token that ``text`` begins with (empty when there is none), and the rest."""
    added = template.tokenizer.added_tokens_decoder.values()
    specials = [t.content for t in added if t.special and text.startswith(t.content)]
    end = max(specials, key=len, default="")
    return end, text[len(end) :]


def _whole(messages: Sequence[Message], tools: Tools | None, template: ChatTemplate) -> list[Piece]:
    pieces = _newest_turns(messages, tools, template)
    whole = template.render(messages, tools, generation_prompt=False)
    if "".join(text for text, _ in pieces) != whole:
        raise ChatTemplateError(
            "the chat template changes earlier turns when a later one comes (it drops their "
            "thinking, say): --loss-mask-type qwen cannot train on that; use qwen3 or distill_qwen"
        )
    return pieces


def _last_turn(
    messages: Sequence[Message], tools: Tools | None, template: ChatTemplate
) -> list[Piece]:
    before = template.render(messages[:-1], tools, generation_prompt=True)
    answer = messages[-1]["content"]
    if not isinstance(answer, str):
        raise ValueError("--loss-mask-type distill_qwen needs text as the last turn's content")
    if before.rstrip().endswith("<think>") and answer.lstrip().startswith("<think>"):
        answer = answer.lstrip().removeprefix("<think>").removeprefix("\n")
    end, _ = _split_end_token(
        template.after_turn(messages[:-1], (), tools, generation_prompt=False), template
    )
    return [(before, False), (answer, True), (end or template.tokenizer.eos_token, True)]


MASK_TYPES: dict[str, Callable[[Sequence[Message], Tools | None, ChatTemplate], list[Piece]]] = {
    "qwen": _whole,
    "qwen3": _newest_turns,
    "distill_qwen": _last_turn,
}
