"""The runner against plain transformers in fp32."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from miles.backends.embedded.kv_slots import UnsupportedModelError
from miles.backends.embedded.runner import PromptInput, Runner

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
    ),
}
NONE = np.empty(0, np.int64)


def make(name: str) -> Any:
    torch.manual_seed(3)
    model = MODELS[name]()
    # Peaked distributions: with the default initialisation a wrong cache would hardly show.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model.requires_grad_(False).eval()


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.fixture(params=MODELS, scope="module")
def models(request: pytest.FixtureRequest) -> tuple[Any, Runner]:
    """A plain model and a runner over the same weights."""
    return make(request.param), Runner(make(request.param), 128)


def test_decoding_rows_of_different_lengths_equals_plain_forwards(
    models: tuple[Any, Runner],
) -> None:
    plain, runner = models
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 9, 1, 9)]
    runner.kv.drop()
    runner.reserve(8, 32, 0, 0)
    logits = runner.step(NONE, NONE, [PromptInput(ids, slot) for slot, ids in enumerate(rows)])
    for _ in range(6):
        for ids, row in zip(rows, logits, strict=True):
            expected = torch.log_softmax(reference_logits(plain, ids), -1)
            torch.testing.assert_close(torch.log_softmax(row, -1), expected, atol=1e-5, rtol=0)
        lengths = np.array([len(ids) for ids in rows])
        tokens = logits.argmax(-1).numpy()
        for ids, token in zip(rows, tokens.tolist(), strict=True):
            ids.append(token)
        logits = runner.step(tokens, lengths)


def test_a_prompt_that_joins_decoding_rows_changes_nothing_for_them(
    models: tuple[Any, Runner],
) -> None:
    plain, runner = models
    runner.kv.drop()
    runner.reserve(4, 32, 0, 0)
    runner.step(NONE, NONE, [PromptInput([5, 6, 7], 0)])
    logits = runner.step(np.array([8]), np.array([3]), [PromptInput([9, 10], 1)])
    torch.testing.assert_close(logits[0], reference_logits(plain, [5, 6, 7, 8]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], reference_logits(plain, [9, 10]), atol=1e-4, rtol=0)


def test_slots_that_share_a_prompt_go_separate_ways(models: tuple[Any, Runner]) -> None:
    plain, runner = models
    runner.kv.drop()
    runner.reserve(4, 16, 0, 0)
    runner.step(NONE, NONE, [PromptInput([1, 2], 3), PromptInput([5, 6, 7], 0, num_slots=3)])
    logits = runner.step(np.array([10, 11, 12, 13]), np.array([3, 3, 3, 2]))
    for row, ids in enumerate(([5, 6, 7, 10], [5, 6, 7, 11], [5, 6, 7, 12], [1, 2, 13])):
        expected = reference_logits(plain, ids)
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


def test_growing_and_moving_slots_keeps_their_content(models: tuple[Any, Runner]) -> None:
    plain, runner = models
    runner.kv.drop()
    runner.reserve(2, 4, 0, 0)
    runner.step(NONE, NONE, [PromptInput([1, 2, 3], 0), PromptInput([4, 5], 1)])
    runner.reserve(5, 40, 2, 3)
    runner.move(np.array([1]), np.array([0]), 2)
    logits = runner.step(np.array([6]), np.array([2]))
    torch.testing.assert_close(logits[0], reference_logits(plain, [4, 5, 6]), atol=1e-4, rtol=0)


def test_what_a_slot_held_before_does_not_reach_its_next_owner(models: tuple[Any, Runner]) -> None:
    plain, runner = models
    runner.kv.drop()
    runner.reserve(2, 16, 0, 0)
    runner.step(NONE, NONE, [PromptInput(list(range(12)), 1)])
    weight = runner.model.get_input_embeddings().weight
    good = weight.clone()
    weight.fill_(torch.nan)
    assert runner.step(NONE, NONE, [PromptInput(list(range(12)), 0)]).isnan().all()
    weight.copy_(good)
    runner.clear(np.array([0]))
    runner.step(NONE, NONE, [PromptInput([1, 2], 0)])
    logits = runner.step(np.array([3, 3]), np.array([2, 12]))
    torch.testing.assert_close(logits[0], reference_logits(plain, [1, 2, 3]), atol=1e-4, rtol=0)


def test_two_runners_in_one_process_do_not_share_slots() -> None:
    plain = make("llama")
    first, second = Runner(make("llama"), 128), Runner(make("llama"), 128)
    for runner, ids in ((first, [1, 2, 3]), (second, [4, 5, 6])):
        runner.reserve(1, 16, 0, 0)
        runner.step(NONE, NONE, [PromptInput(ids, 0)])
    logits = first.step(np.array([7]), np.array([3]))
    torch.testing.assert_close(logits[0], reference_logits(plain, [1, 2, 3, 7]), atol=1e-4, rtol=0)


def test_bytes_of_a_cached_token_are_counted_over_layers_and_heads() -> None:
    runner = Runner(make("qwen3"), 128)
    assert runner.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, fp32


def test_a_state_space_model_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="keeps state other than keys and values"):
        Runner(model, 128)


def test_a_sliding_window_shorter_than_the_context_is_refused_with_the_remedy() -> None:
    config = MistralConfig(**SIZES, sliding_window=16)
    with pytest.raises(UnsupportedModelError, match="--context-length 16 or less"):
        Runner(MistralForCausalLM(config).eval(), 128)


def test_a_sliding_window_as_long_as_the_context_is_no_obstacle() -> None:
    Runner(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval(), 16)


def test_a_model_whose_attention_the_slots_would_change_is_refused() -> None:
    model = make("llama")
    plain_attention = type(model.model.layers[1].self_attn).forward

    def forgetful(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["position_embeddings"] = tuple(
            torch.ones_like(x) for x in kwargs["position_embeddings"]
        )
        output = plain_attention(self, hidden_states, **kwargs)
        return output[0] + hidden_states.mean(1, keepdim=True), output[1]

    class Wrapped(type(model.model.layers[1].self_attn)):
        forward = forgetful

    model.model.layers[1].self_attn.__class__ = Wrapped
    with pytest.raises(UnsupportedModelError, match="other log-probs"):
        Runner(model, 128)


def test_steps_of_one_token_cover_lengths_in_order() -> None:
    """Every length from 1 on, against one forward of the whole sequence."""
    plain, runner = make("qwen2"), Runner(make("qwen2"), 128)
    ids = [(7 * i + 1) % VOCABULARY for i in range(20)]
    whole = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    runner.reserve(1, 32, 0, 0)
    rows = [runner.step(NONE, NONE, [PromptInput(ids[:1], 0)])[0]]
    for position, (_, token) in enumerate(pairwise(ids), start=1):
        rows.append(runner.step(np.array([token]), np.array([position]))[0])
    torch.testing.assert_close(torch.stack(rows), whole, atol=1e-4, rtol=0)
