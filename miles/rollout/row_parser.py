"""One row of prompt data to one ``Prompt``: types, chat template, label, metadata, tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from miles.contracts.types import Message, Prompt
from miles.rollout.chat_template import ChatTemplate, ChatTemplateError
from miles.rollout.rows import BadRow, Row, RowKeys


class _RowError(ValueError):
    """What is wrong with a row, and what to do."""


@dataclass(frozen=True, kw_only=True)
class RowParser:
    """How the rows of one data set become prompts."""

    keys: RowKeys
    template: ChatTemplate | None
    """``None`` to check rows alone: nothing is rendered, the text of a conversation is empty."""
    apply_chat_template: bool
    supervised: bool
    """The row itself holds what is trained: assistant turns, or a label."""
    reads_label: Callable[[Mapping[str, Any]], bool]
    """Whether the reward compares the label of a row with this metadata as text. Raises
    ``ValueError`` for a row that no reward can score."""
    tools: tuple[dict[str, Any], ...] | None
    """Of rows that have none."""

    def parse(self, row: Row | BadRow) -> Prompt | BadRow:
        """A prompt without tokens and number yet, or why it cannot be one."""
        if isinstance(row, BadRow):
            return row
        try:
            return self._parse(row.values)
        except (_RowError, ChatTemplateError) as error:
            return BadRow(row.where, str(error))

    def _parse(self, values: Mapping[str, Any]) -> Prompt:
        self._require_keys(values)
        metadata = _metadata(values.get(self.keys.metadata), self.keys.metadata)
        label = self._label(values, metadata)
        tools = _tools(values.get(self.keys.tools), self.keys.tools) or self.tools
        text, messages = self._input(values)
        if messages is not None and self.template is not None:
            text = self._render(self.template, messages, tools)
        if not text and (messages is None or self.template is not None):
            raise _RowError(f"{self.keys.input!r} is empty; remove the row")
        has_turn = any(m["role"] == "assistant" for m in messages or ())
        if self.supervised and label is None and not has_turn:
            raise _RowError(
                "nothing to train on; give an assistant message or a label (--label-key)"
            )
        return Prompt(
            group_id=0,
            text=text,
            tokens=(),
            messages=messages,
            tools=tools,
            label=label,
            metadata=metadata,
        )

    def _require_keys(self, values: Mapping[str, Any]) -> None:
        missing = [
            f"no key {key!r} ({flag})"
            for key, flag in ((self.keys.input, "--input-key"), (self.keys.label, "--label-key"))
            if key is not None and key not in values
        ]
        if missing:
            raise _RowError(f"{' and '.join(missing)}; it has {', '.join(sorted(values))}")

    def _input(self, values: Mapping[str, Any]) -> tuple[str, tuple[Message, ...] | None]:
        key = self.keys.input
        value = values[key]
        if isinstance(value, str):
            if self.apply_chat_template:
                return "", ({"role": "user", "content": value},)
            return value, None
        if isinstance(value, list):
            messages = tuple(_message(m, key) for m in value)
            if not messages:
                raise _RowError(f"{key!r} is an empty list; give at least one message")
            if not self.apply_chat_template and not self.supervised:
                raise _RowError(f"{key!r} is a message list; add --apply-chat-template")
            return "", messages
        raise _RowError(f"{key!r} is {type(value).__name__}; give text or a list of messages")

    def _render(
        self,
        template: ChatTemplate,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, Any], ...] | None,
    ) -> str:
        prompt = messages
        if self.supervised:
            roles = [m["role"] for m in messages]
            prompt = messages[: roles.index("assistant")] if "assistant" in roles else messages
        return template.render(prompt, tools, generation_prompt=True)

    def _label(self, values: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
        key = self.keys.label
        value = None if key is None else values[key]
        compared = not self.supervised and self._is_compared(metadata)
        if value is None:
            # Without a label's column, --rm-type has the problem unless the row names the reward.
            if compared and (key is not None or metadata.get("rm_type") is not None):
                name = "there is no label (--label-key)" if key is None else f"{key!r} is null"
                raise _RowError(f"{name}, but the reward compares with the label; give one")
            return None
        if isinstance(value, str):
            return value
        if compared or self.supervised:
            return _label_text(value, str(key))
        return _json_text(value, str(key))

    def _is_compared(self, metadata: Mapping[str, Any]) -> bool:
        try:
            return self.reads_label(metadata)
        except ValueError as error:
            raise _RowError(str(error)) from error


def _label_text(value: Any, key: str) -> str:
    """The digits of a whole number. Any other value has several texts, of which an answer would
    have to hit the right one: 1.5, 1.50 and 15e-1 are one number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _RowError(
        f"{key!r} is {type(value).__name__}, but the label is compared or trained as text; write "
        "it as text (whole numbers may stay numbers)"
    )


def _json_text(value: Any, key: str) -> str:
    plain = _plain(value, key)
    try:
        return json.dumps(plain, allow_nan=False)
    except ValueError as error:
        raise _RowError(f"{key!r} cannot be written as JSON ({error})") from error


def _message(value: Any, key: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _RowError(f"{key!r} has a message that is not an object with a role")
    if not isinstance(value.get("content"), str | list | None):
        raise _RowError(f"{key!r} has a message whose content is {type(value['content']).__name__}")
    # Parquet gives every message of a column the same keys, with null where one has nothing.
    message: Message = {k: v for k, v in value.items() if v is not None}
    message.setdefault("content", "")
    return message


def _tools(value: Any, key: str) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str):
        value = _decode(value, key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _RowError(f"{key!r} must be a list of tool schemas, or that as JSON text")
    return tuple(_plain(value, key)) or None


def _metadata(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _decode(value, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _RowError(f"{key!r} is {type(value).__name__}; give an object")
    return _plain(value, key)


def _decode(text: str, key: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _RowError(f"{key!r} is text that is not JSON ({error})") from error


def _plain(value: Any, key: str) -> Any:
    """As plain values, so that a checkpoint can hold it exactly."""
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError) as error:
        raise _RowError(f"{key!r} holds a value that is not plain ({error})") from error
