"""Masks are checked against the rendering of the whole conversation by transformers, and against
spans found by hand in it."""

from typing import Any

import pytest

from miles.rollout.chat_mask import conversation_tokens
from miles.rollout.chat_template import ChatTemplate, ChatTemplateError
from scripts.made_models import make_tokenizer

APPEND_ONLY = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool['name'] }};{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user\n"
    "{% endif %}"
    "<tool_response>{{ message['content'] }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen3's does: thinking stays only behind the last user message, and the last turn always
# shows a (possibly empty) thinking block.
DROPS_THINKING = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last_user = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}"
    "{% set thinking = parts[0].replace('<think>', '').strip() if parts | length > 1 else '' %}"
    "{% if loop.index0 > ns.last_user and (loop.last or thinking) %}"
    "<think>\n{{ thinking }}\n</think>\n\n{% endif %}{{ parts[-1].strip() }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

OPENS_THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|im_start|>assistant\n{{ m['content'].split('</think>')[-1] }}<eos>"
    "{% else %}<|im_start|>user\n{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def template_of(jinja: str) -> ChatTemplate:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = jinja
    return ChatTemplate(tokenizer=tokenizer)


def trained_text(template: ChatTemplate, tokens: list[int], mask: list[int]) -> list[str]:
    """The stretches of text that train."""
    stretches = list[list[int]]()
    for i, (token, bit) in enumerate(zip(tokens, mask, strict=True)):
        if bit and (i == 0 or not mask[i - 1]):
            stretches.append([])
        if bit:
            stretches[-1].append(token)
    return [template.tokenizer.decode(s) for s in stretches]


CONVERSATION = [
    message("system", "be brief"),
    message("user", "1+1"),
    message("assistant", "calc 1+1"),
    message("tool", "2"),
    message("tool", "two"),
    message("assistant", "it is 2"),
    message("user", "ok"),
    message("assistant", "bye"),
]


@pytest.mark.parametrize("mask_type", ["qwen", "qwen3"])
def test_tokens_are_the_template_and_every_assistant_turn_trains(mask_type: str) -> None:
    template = template_of(APPEND_ONLY)
    tools = [{"name": "calc"}]
    tokens, mask = conversation_tokens(CONVERSATION, tools, template, mask_type)
    assert tokens == template.tokenizer.apply_chat_template(
        CONVERSATION, tools=tools, return_dict=False
    )
    assert trained_text(template, tokens, mask) == [
        "calc 1+1<|im_end|>",
        "it is 2<|im_end|>",
        "bye<|im_end|>",
    ]


def test_messages_behind_the_last_assistant_turn_are_left_out() -> None:
    template = template_of(APPEND_ONLY)
    longer = [*CONVERSATION, message("user", "more?")]
    assert conversation_tokens(longer, None, template, "qwen") == conversation_tokens(
        CONVERSATION, None, template, "qwen"
    )


THOUGHTS = [
    message("user", "a"),
    message("assistant", "<think>\nhm\n</think>\n\nfirst"),
    message("user", "b"),
    message("assistant", "<think>\nso\n</think>\n\nsecond"),
]


def test_qwen_refuses_a_template_that_rewrites_earlier_turns() -> None:
    with pytest.raises(ChatTemplateError, match="qwen3"):
        conversation_tokens(THOUGHTS, None, template_of(DROPS_THINKING), "qwen")


def test_qwen3_shows_each_turn_as_it_was_the_newest() -> None:
    template = template_of(DROPS_THINKING)
    tokens, mask = conversation_tokens(THOUGHTS, None, template, "qwen3")
    assert trained_text(template, tokens, mask) == [
        "<think>\nhm\n</think>\n\nfirst<|im_end|>",
        "<think>\nso\n</think>\n\nsecond<|im_end|>",
    ]
    assert template.tokenizer.decode(tokens) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nfirst"
        "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\nso\n"
        "</think>\n\nsecond<|im_end|>\n"
    )


def test_a_single_turn_is_the_template_also_where_it_adds_a_thinking_block() -> None:
    template = template_of(DROPS_THINKING)
    talk = [message("user", "a"), message("assistant", "b")]
    for mask_type in ("qwen", "qwen3"):
        tokens, mask = conversation_tokens(talk, None, template, mask_type)
        assert tokens == template.tokenizer.apply_chat_template(talk, return_dict=False)
        assert trained_text(template, tokens, mask) == ["<think>\n\n</think>\n\nb<|im_end|>"]


def test_distill_qwen_trains_only_the_last_turn_with_its_thinking() -> None:
    template = template_of(OPENS_THINKING)
    tokens, mask = conversation_tokens(THOUGHTS, None, template, "distill_qwen")
    assert template.tokenizer.decode(tokens) == (
        "<|im_start|>user\na<|im_start|>assistant\n\n\nfirst<eos><|im_start|>user\nb"
        "<|im_start|>assistant\n<think>\nso\n</think>\n\nsecond<eos>"
    )
    assert trained_text(template, tokens, mask) == ["so\n</think>\n\nsecond<eos>"]


def test_an_unknown_mask_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="qwen, qwen3, distill_qwen"):
        conversation_tokens(THOUGHTS, None, template_of(APPEND_ONLY), "llama")


def test_a_conversation_without_assistant_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="no assistant turn"):
        conversation_tokens(THOUGHTS[:1], None, template_of(APPEND_ONLY), "qwen")


def test_a_tokenizer_without_template_names_the_flag() -> None:
    with pytest.raises(ChatTemplateError, match="--chat-template-path"):
        conversation_tokens(THOUGHTS, None, template_of(""), "qwen")
