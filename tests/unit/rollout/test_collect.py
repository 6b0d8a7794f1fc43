import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from miles.config.errors import ConfigError
from miles.contracts.engine import EngineError, GenerateRequest
from miles.contracts.hooks import RolloutOutput
from miles.contracts.types import Prompt, Status
from miles.rollout import collect as collect_module
from miles.rollout import steps
from miles.rollout.collect import Collector
from miles.rollout.rewards.score import RewardError
from tests.unit.rollout import made_hooks
from tests.unit.rollout.scripted import ListSource, ScriptedEngines, made_config

HOOKS = "tests.unit.rollout.made_hooks"
Answer = Callable[[str, GenerateRequest], str | None]


def collector_of(tokenizer: Any, answer: Answer, partial: str = "", **changes: Any) -> Any:
    changes.setdefault("custom_rm_path", f"{HOOKS}.reward_of_length")
    engines = ScriptedEngines(tokenizer, answer, partial)
    return Collector(made_config(**changes), engines, tokenizer, ListSource(tokenizer)), engines


def ids(output: RolloutOutput) -> list[int]:
    return [group[0].group_id for group in output.groups]


def slow_unless(*fast: str) -> Answer:
    return lambda text, request: "x<eos>" if text in fast else None


@pytest.fixture(autouse=True)
def _without_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RETRY_DELAY_S", 0.0)
    monkeypatch.setattr(collect_module, "ABORT_AGAIN_S", 0.05)


def test_a_rollout_is_a_batch_of_scored_groups_in_order(tokenizer: Any) -> None:
    collector, engines = collector_of(tokenizer, lambda text, request: "x<eos>")
    first = asyncio.run(collector.collect(0))
    assert ids(first) == [0, 1]
    assert [s.index for group in first.groups for s in group] == [0, 1, 2, 3]
    assert [s.reward for group in first.groups for s in group] == [2.0, 3.0, 2.0, 3.0]
    assert ids(asyncio.run(collector.collect(1))) == [2, 3]
    assert len(engines.requests) == 4


def test_filtered_groups_are_counted_and_replaced(tokenizer: Any) -> None:
    collector, engines = collector_of(
        tokenizer,
        lambda text, request: "xxxx<eos>" if text in ("p0", "p2") else "x<eos>",
        dynamic_sampling_filter_path=f"{HOOKS}.drop_long",
    )
    output = asyncio.run(collector.collect(0))
    assert ids(output) == [1, 3]
    assert output.metrics["rollout/dynamic_filter/drop_long"] == 2
    assert len(engines.requests) == 4, "only as many as were missing"


def test_the_first_groups_make_the_batch_and_the_surplus_comes_first_next_time(
    tokenizer: Any,
) -> None:
    fast = {"p1", "p3"}
    collector, _ = collector_of(
        tokenizer,
        lambda text, request: "x<eos>" if text in fast else None,
        over_sampling_batch_size=4,
    )
    first = asyncio.run(collector.collect(0))
    assert ids(first) == [1, 3]
    assert first.metrics["rollout/aborted"] == 2
    fast |= {"p0", "p2"}
    second = asyncio.run(collector.collect(1))
    assert ids(second) == [0, 2]
    assert all(s.status is Status.COMPLETED for group in second.groups for s in group)


def test_no_prompt_is_lost_or_repeated_over_many_oversampled_rollouts(tokenizer: Any) -> None:
    # Of each five prompts one is slow, until it has been asked for three times.
    asked = dict[str, int]()

    def answer(text: str, request: GenerateRequest) -> str | None:
        asked[text] = asked.get(text, 0) + 1
        return None if int(text[1:]) % 5 == 0 and asked[text] < 3 else "x<eos>"

    collector, _ = collector_of(tokenizer, answer, rollout_batch_size=3, over_sampling_batch_size=7)
    used = [i for r in range(12) for i in ids(asyncio.run(collector.collect(r)))]
    assert len(used) == len(set(used)) == 36
    state = collector.state_dict()
    waiting = [prompt["group_id"] for prompt in state["unused"]]
    assert sorted(used + waiting) == list(range(state["source"]["position"]))


def test_partial_groups_go_on_first_and_ask_for_the_rest(tokenizer: Any) -> None:
    fast = {"p1", "p3"}
    collector, engines = collector_of(
        tokenizer,
        lambda text, request: "x<eos>" if text[:2] in fast else None,
        partial="ab",
        over_sampling_batch_size=4,
        partial_rollout=True,
    )
    asyncio.run(collector.collect(0))
    fast |= {"p0", "p2", "p4", "p5", "p6", "p7"}
    del engines.requests[:]
    engines.version = 1
    output = asyncio.run(collector.collect(1))
    assert ids(output) == [0, 2]
    assert output.metrics["rollout/partial_reused"] == 2
    assert [s.response for s in output.groups[0]] == ["abx<eos>"] * 2
    assert output.groups[0][0].weight_versions == [0, 1]
    resumed = [r for r in engines.requests if len(r.input_ids) == 4]
    assert [r.params.max_new_tokens for r in resumed] == [6] * 4


def test_the_buffer_filter_chooses_which_groups_go_on(tokenizer: Any) -> None:
    fast = {"p3"}
    collector, _ = collector_of(
        tokenizer,
        lambda text, request: "x<eos>" if text[:2] in fast else None,
        partial="ab",
        rollout_batch_size=1,
        over_sampling_batch_size=4,
        partial_rollout=True,
        buffer_filter_path=f"{HOOKS}.last_first",
    )
    asyncio.run(collector.collect(0))
    fast |= {"p0", "p1", "p2"}
    state = collector.state_dict()
    assert [g["prompt"]["group_id"] for g in state["unfinished"]] == [0, 1, 2]
    changed = made_config(
        rollout_batch_size=1,
        partial_rollout=True,
        custom_rm_path=f"{HOOKS}.reward_of_length",
        buffer_filter_path=f"{HOOKS}.last_first",
    )
    engines = ScriptedEngines(tokenizer, lambda text, request: "x<eos>")
    resumed = Collector(changed, engines, tokenizer, ListSource(tokenizer))
    resumed.load_state_dict(state)
    assert ids(asyncio.run(resumed.collect(1))) == [2]
    assert ids(asyncio.run(resumed.collect(2))) == [1]


def test_a_resumed_collector_goes_on_like_the_one_that_was_not_stopped(tokenizer: Any) -> None:
    def answer(text: str, request: GenerateRequest) -> str | None:
        fast = int(text[1:2]) % 2 or len(text) > 2
        return "x<eos>" if fast else None

    def make() -> Any:
        return collector_of(
            tokenizer, answer, partial="ab", over_sampling_batch_size=4, partial_rollout=True
        )[0]

    stopped = make()
    asyncio.run(stopped.collect(0))
    state = json.loads(json.dumps(stopped.state_dict()))
    assert len(state["unfinished"]) == 2
    resumed = make()
    resumed.load_state_dict(state)
    assert asyncio.run(resumed.collect(1)).groups == asyncio.run(stopped.collect(1)).groups


def test_the_state_during_a_rollout_is_the_one_before_it(tokenizer: Any) -> None:
    collector, _ = collector_of(tokenizer, slow_unless("p0"))

    async def run() -> tuple[Any, Any]:
        before = collector.state_dict()
        task = asyncio.ensure_future(collector.collect(0))
        await asyncio.sleep(0.05)
        during = collector.state_dict()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return before, during

    before, during = asyncio.run(run())
    assert before == during == collector.state_dict()


def test_a_group_that_fails_is_tried_again(tokenizer: Any) -> None:
    failures = {"p1": 2}

    def answer(text: str, request: GenerateRequest) -> str:
        if failures.get(text, 0):
            failures[text] -= 1
            raise EngineError("engine went away")
        return "x<eos>"

    collector, _ = collector_of(tokenizer, answer)
    assert ids(asyncio.run(collector.collect(0))) == [0, 1]


def test_a_group_that_fails_for_good_stops_the_rollout_and_is_named(tokenizer: Any) -> None:
    def answer(text: str, request: GenerateRequest) -> str:
        if text == "p1":
            raise EngineError("cannot")
        return "x<eos>"

    collector, engines = collector_of(tokenizer, answer)
    with pytest.raises(steps.GenerationError, match=r"prompt 1 \('p1'\).*EngineError: cannot"):
        asyncio.run(collector.collect(0))
    assert collector.state_dict()["source"]["position"] == 0
    engines.answer = lambda text, request: "x<eos>"
    assert ids(asyncio.run(collector.collect(0))) == [0, 1]


def test_a_group_that_something_else_aborts_is_generated_again(tokenizer: Any) -> None:
    slow = {"p1"}
    collector, engines = collector_of(
        tokenizer, lambda text, request: None if text in slow else "x<eos>"
    )

    async def run() -> RolloutOutput:
        task = asyncio.ensure_future(collector.collect(0))
        await asyncio.sleep(0.05)
        slow.clear()
        await engines.abort_all()
        return await task

    output = asyncio.run(run())
    assert ids(output) == [0, 1]
    assert output.groups[1][0].response == "x<eos>"


def test_a_filter_that_keeps_nothing_stops_the_rollout_with_its_name(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "MIN_DROPS", 20)
    monkeypatch.setattr(collect_module, "MAX_DROPS_PER_PROMPT", 10)
    collector, engines = collector_of(
        tokenizer,
        lambda text, request: "x<eos>",
        dynamic_sampling_filter_path=f"{HOOKS}.drop_all",
    )
    with pytest.raises(ConfigError, match=r"drop_all.*dropped 20 groups in a row"):
        asyncio.run(collector.collect(0))
    # Of the two groups of a batch the other may be on its way when the last one is dropped.
    assert len(engines.requests) in (20, 21)


def test_a_rollout_without_any_reward_stops_and_can_be_collected_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, _ = collector_of(
        tokenizer, lambda text, request: "x<eos>", custom_rm_path=f"{HOOKS}.reward_unless_down"
    )
    monkeypatch.setattr(made_hooks, "down", {0, 1, 2, 3})
    says = r"none of 4 responses got a reward \(--custom-rm-path .*judge is down \(.*made_hooks.py:"
    with pytest.raises(RewardError, match=says):
        asyncio.run(collector.collect(0))
    monkeypatch.setattr(made_hooks, "down", {0, 1, 2})
    output = asyncio.run(collector.collect(0))
    assert ids(output) == [0, 1]
    assert [s.reward for group in output.groups for s in group] == [0.0, 0.0, 0.0, 1.0]
    assert output.metrics["rollout/reward_failed"] == 3


def test_the_reward_that_failed_is_the_one_the_rows_name(tokenizer: Any) -> None:
    class Rows(ListSource):
        def next(self, num_prompts: int) -> list[Prompt]:
            prompts = super().next(num_prompts)
            return [replace(p, label=None, metadata={"rm_type": "exact_match"}) for p in prompts]

    config = made_config(rm_type="random")
    engines = ScriptedEngines(tokenizer, lambda text, request: "x<eos>", "")
    collector = Collector(config, engines, tokenizer, Rows(tokenizer))
    says = r"none of 4 responses got a reward \(metadata\.rm_type exact_match of the row\): "
    with pytest.raises(RewardError, match=says):
        asyncio.run(collector.collect(0))


def test_hooks_see_the_groups_they_are_promised(tokenizer: Any) -> None:
    collector, _ = collector_of(
        tokenizer,
        lambda text, request: "xxxx<eos>" if text == "p0" else "x<eos>",
        dynamic_sampling_filter_path=f"{HOOKS}.drop_long",
        rollout_sample_filter_path=f"{HOOKS}.remove_odd",
        rollout_all_samples_process_path=f"{HOOKS}.see_all",
    )
    output = asyncio.run(collector.collect(0))
    assert [[s.remove_sample for s in g] for g in output.groups] == [[False, True]] * 2
    assert sorted(g[0].group_id for g in made_hooks.seen_groups) == [0, 1, 2]


def test_a_deterministic_rollout_numbers_its_requests_and_takes_groups_in_order(
    tokenizer: Any,
) -> None:
    late = asyncio.Event()

    class LateFirst(ScriptedEngines):
        async def generate(self, request: GenerateRequest) -> Any:
            if self.tokenizer.decode(list(request.input_ids)) == "p0":
                await late.wait()
            elif len(self.requests) == 3:
                late.set()
            return await super().generate(request)

    config = made_config(
        deterministic_rollout=True,
        over_sampling_batch_size=4,
        custom_rm_path=f"{HOOKS}.reward_of_length",
    )
    engines = LateFirst(tokenizer, lambda text, request: "x<eos>")

    async def run() -> tuple[RolloutOutput, RolloutOutput]:
        collector = Collector(config, engines, tokenizer, ListSource(tokenizer))
        late.clear()
        asyncio.get_running_loop().call_later(0.05, late.set)
        return await collector.collect(0), await collector.collect(1)

    first, second = asyncio.run(run())
    assert (ids(first), ids(second)) == ([0, 1], [2, 3])
    admissions = [r.admission for r in engines.requests]
    assert sorted(a for a in admissions if a and a[0] == "0:0") == [
        ("0:0", position, 4) for position in range(4)
    ]
    seeds = [r.params.sampling_seeds for r in engines.requests]
    assert len({seed for pair in seeds for seed in pair or ()}) == 16


def test_a_multi_turn_function_cannot_slip_past_an_abort(tokenizer: Any) -> None:
    collector, engines = collector_of(
        tokenizer,
        lambda text, request: "x<eos>",
        custom_generate_function_path=f"{HOOKS}.many_calls",
        over_sampling_batch_size=3,
    )
    output = asyncio.run(collector.collect(0))
    assert ids(output) == [0, 1]
    before = len(engines.requests)
    assert before < 1000


def test_a_state_with_another_group_size_is_refused(tokenizer: Any) -> None:
    collector, _ = collector_of(
        tokenizer,
        slow_unless("p1", "p3"),
        partial="ab",
        over_sampling_batch_size=4,
        partial_rollout=True,
    )
    asyncio.run(collector.collect(0))
    other, _ = collector_of(tokenizer, slow_unless(), n_samples_per_prompt=4)
    with pytest.raises(ConfigError, match="--n-samples-per-prompt"):
        other.load_state_dict(collector.state_dict())
