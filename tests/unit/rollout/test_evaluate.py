import asyncio
from itertools import combinations
from typing import Any

import pytest

from miles.contracts.engine import EngineError, GenerateRequest
from miles.contracts.types import Sample, Status
from miles.rollout import steps
from miles.rollout.evaluate import evaluate, pass_at_k, set_metrics
from tests.unit.rollout.scripted import ScriptedEngines, made_config, made_prompt


def run(tokenizer: Any, **changes: Any) -> Any:
    prompts = [made_prompt(i, tokenizer, f"q{i}", label=f"a{i % 2}") for i in range(4)]
    sets = {"first": prompts, "second": prompts[:1]}
    engines = ScriptedEngines(tokenizer, lambda text, request: "a0<eos>")
    config = made_config(rm_type="exact_match", **changes)
    return *asyncio.run(evaluate(3, sets, config, engines, tokenizer)), engines


def test_each_set_has_its_mean_reward_and_its_samples_in_order(tokenizer: Any) -> None:
    metrics, samples, _ = run(tokenizer, n_samples_per_eval_prompt=3)
    assert metrics["eval/first"] == 0.5
    assert metrics["eval/second"] == 1.0
    assert metrics["eval/first/response_len/mean"] == 3.0
    assert metrics["eval/first/truncated_ratio"] == 0.0
    assert [s.index for s in samples["first"]] == list(range(12))
    assert [s.prompt.text for s in samples["first"][::3]] == ["q0", "q1", "q2", "q3"]


def test_evaluation_has_its_own_sampling(tokenizer: Any) -> None:
    changes = {"eval_temperature": 0.0, "eval_top_k": 1, "eval_max_response_len": 2}
    metrics, _, engines = run(tokenizer, rollout_temperature=0.7, rollout_top_p=0.9, **changes)
    params = engines.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.9, 1)
    assert params.max_new_tokens == 2
    assert metrics["eval/first/truncated_ratio"] == 1.0


def test_a_deterministic_evaluation_admits_each_set_in_order(tokenizer: Any) -> None:
    _, _, engines = run(tokenizer, deterministic_rollout=True)
    assert [r.admission for r in engines.requests] == [
        *[("eval:3:first", position, 4) for position in range(4)],
        ("eval:3:second", 0, 1),
    ]


def test_a_prompt_that_cannot_be_answered_stops_the_evaluation(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "RETRY_DELAY_S", 0.0)

    def answer(text: str, request: GenerateRequest) -> str:
        raise EngineError("gone")

    config = made_config(rm_type="exact_match")
    engines = ScriptedEngines(tokenizer, answer)
    sets = {"s": [made_prompt(0, tokenizer, "q0", label="a")]}
    with pytest.raises(steps.GenerationError, match="q0"):
        asyncio.run(evaluate(0, sets, config, engines, tokenizer))


def test_pass_at_k_is_the_share_of_draws_with_a_solution() -> None:
    for solved in ([True, False, False, False, True], [False] * 5, [True] * 5):
        for k in (1, 2, 4, 5):
            draws = list(combinations(solved, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(solved, k) == pytest.approx(share)


def test_pass_at_k_is_logged_for_powers_of_two(tokenizer: Any) -> None:
    prompt = made_prompt(0, tokenizer)
    groups = [
        [
            Sample(prompt=prompt, index=i, tokens=[1], reward=r, status=Status.COMPLETED)
            for i, r in enumerate(rewards)
        ]
        for rewards in ([1.0, 0.0, 0.5, 0.0], [0.9, 0.0, 0.0, 0.0])
    ]
    config = made_config(n_samples_per_eval_prompt=4, log_passrate=True)
    metrics = set_metrics("s", groups, config)
    assert metrics["eval/s/pass@1"] == pytest.approx(1 / 8)
    assert metrics["eval/s/pass@2"] == pytest.approx(1 / 4)
    assert metrics["eval/s/pass@4"] == pytest.approx(1 / 2)
    assert "eval/s/pass@3" not in metrics
