"""Rendering conversations with the tokenizer's chat template, and extending them turn by turn.

A model writes tokens that no rendering may change, so a conversation grows by what the template
puts *between* two assistant turns: it is cut out of a rendering in which a marker stands for what
the assistant wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from miles.contracts.types import Message

MARKER = "⟦assistant-turn-{}⟧"


_WAYS_TO_FAIL = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Of a template: those of Jinja, and of the Python in its expressions."""


class ChatTemplateError(ValueError):
    """A chat template that is missing, fails on a conversation, or cannot be extended."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's chat template with the job's extra arguments."""

    tokenizer: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool,
    ) -> str:
        """The conversation as text; with ``generation_prompt`` it ends where the model goes on."""
        if not self.tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; give one with --chat-template-path"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs,
            )
        except _WAYS_TO_FAIL as error:
            raise ChatTemplateError(
                f"the chat template refuses the conversation: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: the template has put the special tokens there already."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def after_turn(
        self,
        messages: Sequence[Message],
        later: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool,
    ) -> str:
        """What follows an assistant turn that answers ``messages``, up to the next one.

        It begins with the turn's end token and holds the ``later`` messages.
        """
        marker = MARKER.format(len(messages))
        turn: Message = {"role": "assistant", "content": marker}
        text = self.render([*messages, turn, *later], tools, generation_prompt=generation_prompt)
        _, found, rest = text.rpartition(marker)
        if not found:
            raise ChatTemplateError(
                "the chat template leaves out or changes what the assistant wrote, so that its "
                "tokens cannot be placed; give another one with --chat-template-path"
            )
        return rest


def assistant_marker(position: int) -> Message:
    """A stand-in for the assistant turn at that position of a conversation."""
    return {"role": "assistant", "content": MARKER.format(position)}
