"""What every engine server answers, whichever it is: SGLang's protocol as Miles uses it."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.contracts.engine import PauseMode
from miles.contracts.types import NamedTensor
from miles.core import device
from miles.rollout.engine_client import EngineClient
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.colocated import ColocatedTransport
from miles.weight_sync.session import WeightSync
from tests.contract.conftest import SharpModels
from tests.engine_process import Answer, get, post, running_requests, wait_for, wait_idle

PROMPT = [5, 17, 30, 9]
LONG = 300
"""Tokens of a request that is still running when a test looks."""
ENDLESS = 1900
"""Of one that a test aborts: however late it comes to that, the request is not done."""


@pytest.fixture(scope="module")
def model(engine_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(engine_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(engine_model)


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


SERVERS = ["engine_url", pytest.param("sglang_url", marks=pytest.mark.sglang)]


@pytest.fixture(params=SERVERS, ids=["embedded", "sglang"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with left_running(request.getfixturevalue(request.param)) as url:
        yield url


@contextmanager
def left_running(url: str) -> Iterator[str]:
    """The engine is idle and not paused after the block."""
    yield url
    post(url, "/abort_request", {"abort_all": True})
    post(url, "/continue_generation")


def generate(url: str, ids: list[int] = PROMPT, rid: str | None = None, **params: Any) -> Any:
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    answer = post(url, "/generate", body if rid is None else {**body, "rid": rid})
    assert answer.status == 200, answer.body
    return answer.json


def greedy_once_more(url: str, count: int, **params: Any) -> Any:
    """The answer to a greedy request that is computed as the one before was: keys and values that
    are there still come from other kernels, and in bf16 a token may turn out otherwise."""
    wait_idle(url)
    return generate(url, temperature=0, max_new_tokens=count, **params)


def greedy(url: str, count: int, **params: Any) -> list[int]:
    params = {"ignore_eos": True, **params}
    return generate(url, temperature=0, max_new_tokens=count, **params)["output_ids"]


def start_long(
    url: str, threads: ThreadPoolExecutor, rid: str | None = None, **params: Any
) -> "Future[Any]":
    """A greedy request of ``LONG`` tokens that is running when this returns."""
    params = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True, **params}
    before = running_requests(url)
    future = threads.submit(generate, url, PROMPT, rid, **params)
    wait_for(lambda: running_requests(url) > before or future.done())
    assert not future.done()
    return future


def reference_log_probs(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.float() / temperature, -1)


def assert_greedy(model: Any, prompt: list[int], ids: list[int], tolerance: float) -> None:
    """Each token is the likeliest after those before it, as far as the arithmetic tells."""
    reference = reference_log_probs(model, prompt + ids, 1.0)[len(prompt) - 1 : -1]
    chosen = reference.gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(chosen, reference.max(-1).values, atol=tolerance, rtol=0)


def finish(sample: Any) -> str:
    return sample["meta_info"]["finish_reason"]["type"]


# Generation


def test_an_answer_has_the_fields_of_the_protocol(url: str, tokenizer: Any) -> None:
    answer = generate(url, temperature=1, max_new_tokens=5, ignore_eos=True, rid="mine")
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 5)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert len(answer["output_ids"]) == 5
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert "weight_version" in meta
    assert "cached_tokens" in meta
    expected = tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert answer["text"] == expected


def test_greedy_tokens_equal_transformers_in_a_batch_of_different_lengths(
    url: str, threads: ThreadPoolExecutor, model: Any, sharp: SharpModels
) -> None:
    prompts = [[*[5, 17, 30, 9, 22, 41][: 1 + i % 6], 7 + i] for i in range(12)]
    answers = list(
        threads.map(
            lambda ids: generate(url, ids, temperature=0, max_new_tokens=20, ignore_eos=True),
            prompts,
        )
    )
    for ids, answer in zip(prompts, answers, strict=True):
        assert_greedy(model, ids, answer["output_ids"], sharp.tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers_at_the_temperature(
    url: str, model: Any, sharp: SharpModels, temperature: float
) -> None:
    samples = generate(
        url, temperature=temperature, top_p=0.9, top_k=40, max_new_tokens=24, n=3, ignore_eos=True
    )
    for sample in samples:
        ids = sample["output_ids"]
        reference = reference_log_probs(model, PROMPT + ids, temperature)
        expected = reference[len(PROMPT) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        found = torch.tensor([entry[0] for entry in sample["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(found, expected, atol=sharp.tolerance, rtol=0)


def test_n_samples_come_as_a_list_and_differ(url: str) -> None:
    samples = generate(url, temperature=1, max_new_tokens=12, n=6, ignore_eos=True)
    assert len(samples) == 6
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 6
    assert len({sample["meta_info"]["id"] for sample in samples}) == 6


def test_without_return_logprob_none_are_sent(url: str) -> None:
    answer = post(url, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert "output_token_logprobs" not in answer.json["meta_info"]


def test_text_can_be_the_prompt(url: str, tokenizer: Any) -> None:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answer = post(url, "/generate", {"text": "12=", "sampling_params": params})
    wait_idle(url)
    ids = tokenizer("12=")["input_ids"]
    assert answer.json["output_ids"] == generate(url, ids, **params)["output_ids"]


def test_a_stop_token_ends_the_output_and_is_part_of_it(url: str, tokenizer: Any) -> None:
    free = greedy(url, 30)
    stop = free[10]
    end = free.index(stop)
    assert end > 2
    answer = greedy_once_more(url, 30, stop_token_ids=[stop])
    assert answer["output_ids"] == free[: end + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == tokenizer.decode(free[:end], skip_special_tokens=True)


def test_a_stop_string_over_several_tokens_ends_the_output(url: str, tokenizer: Any) -> None:
    free = greedy(url, 30)
    text = tokenizer.decode(free, skip_special_tokens=True)
    stop = text[8:11]
    assert len(stop) == 3
    answer = greedy_once_more(url, 30, stop=["never there", stop], ignore_eos=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    count = len(answer["output_ids"])
    assert answer["output_ids"] == free[:count]
    assert stop in tokenizer.decode(free[:count])
    assert stop not in tokenizer.decode(free[: count - 1])
    kept = greedy_once_more(url, 30, stop=stop, no_stop_trim=True, ignore_eos=True)
    assert kept["text"] == text[: text.index(stop) + 3]


# Abort and pause


def test_an_aborted_request_returns_what_it_has(url: str, threads: ThreadPoolExecutor) -> None:
    other = start_long(url, threads, "other", max_new_tokens=3 * LONG)
    mine = start_long(url, threads, "mine", max_new_tokens=ENDLESS)
    assert post(url, "/abort_request", {"rid": "mine"}).status == 200
    sample = mine.result()
    assert finish(sample) == "abort"
    assert len(sample["output_ids"]) < ENDLESS
    assert len(sample["meta_info"]["output_token_logprobs"]) == len(sample["output_ids"])
    assert finish(other.result()) == "length"


def test_abort_all_ends_everything_and_the_engine_goes_on(
    url: str, threads: ThreadPoolExecutor
) -> None:
    futures = [start_long(url, threads, max_new_tokens=ENDLESS) for _ in range(3)]
    assert post(url, "/abort_request", {"abort_all": True}).status == 200
    assert [finish(future.result()) for future in futures] == ["abort"] * 3
    assert len(greedy(url, 3)) == 3


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_as_if_nothing_had_happened(
    url: str, threads: ThreadPoolExecutor, model: Any, sharp: SharpModels, mode: str
) -> None:
    future = start_long(url, threads)
    assert post(url, "/pause_generation", {"mode": mode}).status == 200
    queued = threads.submit(greedy, url, 4)
    with pytest.raises(TimeoutError):
        future.result(0.5)
    assert not queued.done()
    assert post(url, "/continue_generation").status == 200
    sample = future.result()
    assert finish(sample) == "length"
    ids = sample["output_ids"]
    assert len(ids) == LONG
    assert_greedy(model, PROMPT, ids, sharp.tolerance)
    assert queued.result() == ids[:4]


def test_pausing_by_abort_ends_requests_and_holds_new_ones(
    url: str, threads: ThreadPoolExecutor
) -> None:
    future = start_long(url, threads, max_new_tokens=ENDLESS)
    assert post(url, "/pause_generation", {"mode": "abort"}).status == 200
    assert finish(future.result()) == "abort"
    queued = threads.submit(greedy, url, 3)
    with pytest.raises(TimeoutError):
        queued.result(0.3)
    post(url, "/continue_generation")
    assert len(queued.result()) == 3


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_paused_engine_says_what_it_is(url: str, engine_model: Path, mode: str) -> None:
    """By which one that hangs is told from one that a failed weight update has left paused."""
    post(url, "/pause_generation", {"mode": mode})
    assert get(url, "/server_info").json["model_path"] == str(engine_model)


# Weights


def test_a_response_reports_the_version_that_finished_it(
    url: str, threads: ThreadPoolExecutor, engine_model: Path, tmp_path: Path
) -> None:
    same = tmp_path / "same"
    shutil.copytree(engine_model, same)
    before = get(url, "/model_info").json["weight_version"]
    future = start_long(url, threads)
    post(url, "/pause_generation", {"mode": "retract"})
    update = {"model_path": str(same), "weight_version": "41", "flush_cache": False}
    answer = post(url, "/update_weights_from_disk", update)
    assert (answer.status, answer.json["success"]) == (200, True)
    post(url, "/continue_generation")
    assert future.result()["meta_info"]["weight_version"] == "41"
    assert get(url, "/model_info").json["weight_version"] == "41" != before


def test_weights_from_disk_change_what_is_generated(
    url: str, engine_model: Path, sharp: SharpModels, tmp_path: Path
) -> None:
    other = sharp.write(tmp_path / "other", seed=7)
    theirs = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    outputs: list[list[int]] = []
    for path in (other, engine_model):
        post(url, "/pause_generation", {"mode": "abort"})
        wait_idle(url)
        answer = post(url, "/update_weights_from_disk", {"model_path": str(path)})
        assert answer.json["success"], answer.body
        post(url, "/continue_generation")
        outputs.append(greedy(url, 12))
    assert_greedy(theirs, PROMPT, outputs[0], sharp.tolerance)
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_after_an_update_a_known_prompt_is_read_by_the_new_weights(
    url: str, engine_model: Path, sharp: SharpModels, tmp_path: Path, mode: PauseMode
) -> None:
    """Its keys and values of before are those of the old ones."""
    other = sharp.write(tmp_path / "other", seed=7)
    prompt = [5 + i % 40 for i in range(64)]
    how: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    generate(url, prompt, **how)
    if mode == "in_place":
        # To the engine the request would be one that goes on, with its keys and values. Not by a
        # flush, which would take what the update is to take.
        wait_for(lambda: running_requests(url) == 0)
    try:
        push_weights(url, other, mode)
        sample = generate(url, prompt, **how)
    finally:
        push_weights(url, engine_model, mode)
    ids, theirs = (
        sample["output_ids"],
        AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32),
    )
    expected = reference_log_probs(theirs, prompt + ids, 1.0)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    found = torch.tensor([entry[0] for entry in sample["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, expected, atol=10 * sharp.tolerance, rtol=0)


def push_weights(url: str, model: Path, mode: PauseMode) -> None:
    engines = HttpEngineSet((url,), timeout_s=60)
    transport = ColocatedTransport(timeout_s=60)
    sync = WeightSync(lambda _: transport, max_bytes=2**20, pause_mode=mode)
    where = str(device.current_device())
    weights = load_file(model / "model.safetensors", device=where).items()
    sync.push(engines, [NamedTensor(name=name, tensor=tensor) for name, tensor in weights])
    engines.close()


def test_requests_paused_in_place_keep_their_keys_and_values(
    url: str, threads: ThreadPoolExecutor
) -> None:
    future = start_long(url, threads)
    post(url, "/pause_generation", {"mode": "in_place"})
    assert post(url, "/flush_cache").status == 400
    post(url, "/continue_generation")
    assert len(future.result()["output_ids"]) == LONG


def test_what_still_runs_when_memory_is_to_be_given_up_is_ended_first(
    url: str, threads: ThreadPoolExecutor
) -> None:
    """At a release that meets a request SGLang ends."""

    async def drain() -> None:
        client = EngineClient(url, timeout_s=60)
        await client.drain(0.1)
        await client.release_memory(["kv_cache"])
        await client.resume_memory(["kv_cache"])
        await client.close()

    future = start_long(url, threads, max_new_tokens=ENDLESS)
    asyncio.run(drain())
    assert finish(future.result()) == "abort"
    assert len(greedy(url, 3)) == 3


# Information and refusals


def test_health_and_information(url: str, engine_model: Path) -> None:
    assert get(url, "/health").status == 200
    assert get(url, "/health_generate").status == 200
    assert get(url, "/server_info").json["model_path"] == str(engine_model)
    assert get(url, "/get_server_info").status == 200
    assert get(url, "/model_info").json["model_path"] == str(engine_model)
    assert get(url, "/v1/models").json["data"][0]["id"] == str(engine_model)
    assert get(url, "/v1/loads").status == 200


def test_the_cache_can_be_flushed_when_nothing_runs(url: str) -> None:
    wait_idle(url)
    assert get(url, "/flush_cache").status == 200
    assert post(url, "/flush_cache").status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": [], "sampling_params": {}},
        {"input_ids": [5] * 5000, "sampling_params": {}},
        {"input_ids": [5], "sampling_params": {"temperature": -1.0}},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": -1}},
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(url: str, body: Any) -> None:
    answer: Answer = post(url, "/generate", body)
    assert answer.status == 400, answer.body
    assert answer.body
    assert len(greedy(url, 2)) == 2
