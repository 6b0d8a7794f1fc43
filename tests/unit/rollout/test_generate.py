import asyncio
import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest

from miles.contracts.engine import Completion, GenerateRequest
from miles.contracts.hooks import GenerateContext
from miles.contracts.types import Sample, Status
from miles.rollout.generate import generate, sampling_seed
from miles.rollout.steps import sampling_params
from tests.unit.rollout.scripted import ScriptedEngines, made_config, made_prompt


def context_of(engines: ScriptedEngines, **changes: Any) -> GenerateContext:
    config = made_config(**changes)
    return GenerateContext(
        config=config,
        engines=engines,
        tokenizer=engines.tokenizer,
        params=sampling_params(config, evaluation=False),
        num_samples=config.data.n_samples_per_prompt,
        evaluation=False,
        first_index=10,
        admission=("0:0", 3, 4),
    )


def run(engines: ScriptedEngines, context: GenerateContext, text: str = "ab=") -> list[Sample]:
    return asyncio.run(generate(made_prompt(5, engines.tokenizer, text), context))


def partial_sample(tokenizer: Any, response: str, status: Status, index: int = 10) -> Sample:
    prompt = made_prompt(5, tokenizer, "ab=")
    ids = tokenizer.encode(response)
    return Sample(
        prompt=prompt,
        index=index,
        tokens=[*prompt.tokens, *ids],
        response_length=len(ids),
        response=response,
        loss_mask=[1] * len(ids),
        rollout_log_probs=[-1.0] * len(ids),
        weight_versions=[1],
        status=status,
    )


def test_all_samples_of_a_prompt_share_one_request(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "xy<eos>")
    engines.version = 7
    samples = run(engines, context_of(engines, n_samples_per_prompt=3))
    (request,) = engines.requests
    assert (request.n, request.admission) == (3, ("0:0", 3, 4))
    assert request.params.max_new_tokens == 8
    assert [s.index for s in samples] == [10, 11, 12]
    for sample in samples:
        sample.validate()
        assert tokenizer.decode(sample.tokens) == "ab=xy<eos>"
        assert sample.response == "xy<eos>"
        assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])
        assert sample.rollout_log_probs == [-0.25, -0.5, -0.75]
        assert sample.weight_versions == [7]
        assert sample.status is Status.COMPLETED


def test_a_response_that_hits_the_limit_is_truncated(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "x" * 20)
    (sample, _) = run(engines, context_of(engines))
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 8)


def test_the_context_limit_clips_the_response(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "x" * 20)
    (sample, _) = run(engines, context_of(engines, rollout_max_context_len=7))
    assert engines.requests[0].params.max_new_tokens == 4
    assert len(sample.tokens) == 7


def test_a_prompt_without_room_for_a_response_is_an_error(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "x")
    with pytest.raises(ValueError, match="--rollout-max-context-len 3"):
        run(engines, context_of(engines, rollout_max_context_len=3))


def test_a_partial_sample_asks_only_for_the_tokens_that_are_left(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "y" * 700)
    old = partial_sample(tokenizer, "x" * 300, Status.ABORTED)
    context = context_of(engines, rollout_max_response_len=1000, n_samples_per_prompt=1)
    (sample,) = run(engines, replace(context, unfinished=(old,)))
    (request,) = engines.requests
    assert request.params.max_new_tokens == 700
    assert list(request.input_ids) == old.tokens
    assert sample.response == "x" * 300 + "y" * 700
    assert sample.response_length == 1000
    assert sample.status is Status.TRUNCATED
    assert sample.weight_versions == [1, 0]
    assert old.response_length == 300, "what the buffer holds is left as it is"


def test_a_stop_string_that_an_abort_has_cut_in_two_ends_the_sample(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "cd=abcd")
    old = partial_sample(tokenizer, "xab", Status.ABORTED)
    changes = {"rollout_stop": ("zz", "abcd"), "rollout_max_response_len": 32}
    context = context_of(engines, n_samples_per_prompt=1, **changes)
    (sample,) = run(engines, replace(context, unfinished=(old,)))
    assert (sample.response, sample.status) == ("xabcd", Status.COMPLETED)
    assert sample.rollout_log_probs == [-1.0] * 3 + [-0.25, -0.5]
    sample.validate()


def test_masked_old_tokens_of_a_resumed_sample_do_not_train(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "yyyy<eos>")
    old = partial_sample(tokenizer, "x" * 10, Status.ABORTED)
    changes = {"mask_offpolicy_in_partial_rollout": True, "n_samples_per_prompt": 1}
    context = context_of(engines, rollout_max_response_len=32, **changes)
    (sample,) = run(engines, replace(context, unfinished=(old,)))
    assert sample.loss_mask == [0] * 10 + [1] * 5
    sample.validate()


def test_a_resumed_group_keeps_its_finished_samples_and_their_order(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: "z<eos>")
    empty = partial_sample(tokenizer, "", Status.ABORTED, index=10)
    empty.weight_versions = []
    done = partial_sample(tokenizer, "ok<eos>", Status.COMPLETED, index=11)
    part = partial_sample(tokenizer, "xx", Status.ABORTED, index=12)
    context = context_of(engines, n_samples_per_prompt=3)
    samples = run(engines, replace(context, unfinished=(empty, done, part)))
    assert [s.response for s in samples] == ["z<eos>", "ok<eos>", "xxz<eos>"]
    assert [s.index for s in samples] == [10, 11, 12]
    assert [s.status for s in samples] == [Status.COMPLETED] * 3
    assert len(engines.requests) == 2
    assert [r.admission for r in engines.requests] == [("0:0", 3, 4), None]


def test_an_aborted_request_leaves_its_tokens_in_the_sample(tokenizer: Any) -> None:
    engines = ScriptedEngines(tokenizer, lambda text, request: None, partial="xy")

    async def abort_soon(context: GenerateContext) -> list[Sample]:
        task = asyncio.ensure_future(generate(made_prompt(0, tokenizer), context))
        await asyncio.sleep(0.01)
        await engines.abort_all()
        return await task

    (sample, _) = asyncio.run(abort_soon(context_of(engines)))
    assert (sample.status, sample.response) == (Status.ABORTED, "xy")


def test_a_log_prob_that_the_engine_did_not_give_stays_nan(tokenizer: Any) -> None:
    class NullLogProbs(ScriptedEngines):
        def completion(
            self, text: str, request: GenerateRequest, *, aborted: bool = False
        ) -> Completion:
            whole = super().completion(text, request, aborted=aborted)
            return replace(whole, log_probs=(whole.log_probs[0], math.nan))

    engines = NullLogProbs(tokenizer, lambda text, request: "xy")
    (sample, _) = run(engines, context_of(engines))
    assert sample.rollout_log_probs[0] == -0.25
    assert math.isnan(sample.rollout_log_probs[1])


def test_the_sampling_seed_is_the_documented_hash() -> None:
    digest = hashlib.blake2b(b"42:3:17", digest_size=8).digest()
    assert sampling_seed(42, 3, 17) == int.from_bytes(digest, "little") // 2
    seeds = {sampling_seed(s, r, i) for s in range(3) for r in range(10) for i in range(50)}
    assert len(seeds) == 1500
    assert all(0 <= seed < 2**63 for seed in seeds)
