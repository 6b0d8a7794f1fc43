"""Weight sync end to end: two trainer ranks, each transport, real engine servers."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from miles.contracts.engine import Completion, EngineError, GenerateRequest, SamplingParams
from miles.rollout.engine_client import EngineClient, EngineUnreachable
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.checksums import checksum
from miles.weight_sync.session import WeightMismatchError
from tests.contract.trainer_ranks import TrainerRanks, new_weights
from tests.engine_process import EngineProcess, launch, running_requests, wait_for

TRANSPORTS = ["colocated", "broadcast"]
PROMPT = [5, 17, 30, 9]


def start_engines(model: Path, folder: Path, count: int) -> list[EngineProcess]:
    """Side by side, because most of a start is imports."""
    engines = [launch(model, folder / str(i)) for i in range(count)]
    return [engine.wait_ready() for engine in engines]


def stop(engines: list[EngineProcess]) -> None:
    for engine in engines:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture(scope="module")
def ranks() -> Iterator[TrainerRanks]:
    ranks = TrainerRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=["tiny_qwen3", "tiny_qwen3_untied"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    engines = start_engines(model, tmp_path_factory.mktemp("engines"), 2)
    yield engines
    stop(engines)


def engine_set(engines: list[EngineProcess], **how: Any) -> HttpEngineSet:
    return HttpEngineSet(tuple(e.url for e in engines), timeout_s=how.pop("timeout_s", 60), **how)


def generate(url: str, timeout_s: float = 60.0, max_new_tokens: int = 4) -> Completion:
    """A greedy continuation."""

    async def main() -> Completion:
        client = EngineClient(url, timeout_s=timeout_s)
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
        try:
            return (await client.generate(GenerateRequest(input_ids=PROMPT, params=params)))[0]
        finally:
            await client.close()

    return asyncio.run(main())


def log_probs_by_transformers(model: Path, seed: int, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of each token after ``PROMPT``, by a fresh model that holds the weights of ``seed``."""
    # Loaded as a checkpoint: a model that is there holds the experts of a layer in one parameter.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(model, folder, dirs_exist_ok=True)
        save_file(new_weights(model, seed), Path(folder) / "model.safetensors", {"format": "pt"})
        reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *tokens]])).logits[0].float()
    scores = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)
    return scores[torch.arange(len(tokens)), torch.tensor(tokens)]


def reported_version(url: str) -> int:
    async def main() -> int:
        client = EngineClient(url, timeout_s=60)
        try:
            return await client.weight_version()
        finally:
            await client.close()

    return asyncio.run(main())


def leftover_segments(ranks: TrainerRanks) -> list[str]:
    return [n for n in os.listdir("/dev/shm") if n.startswith(f"miles-{ranks.source_pid}-")]


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_new_weights_arrive_bit_for_bit_and_engines_generate_from_them(
    transport: str, num_engines: int, model: Path, engines: list[EngineProcess], ranks: TrainerRanks
) -> None:
    chosen = engines[:num_engines]
    seed = 10 * num_engines + TRANSPORTS.index(transport)
    pushed = ranks.push(transport, engine_set(chosen), model, seed=seed, version=seed)
    assert [version for version, _ in pushed] == [seed + 1, seed + 1]
    assert pushed[0][1].keys() >= {"pause", "gather", "digest", "send", "end", "check", "resume"}

    expected = {name: checksum(tensor) for name, tensor in new_weights(model, seed).items()}
    assert engine_set(chosen).weight_checksums() == [expected] * num_engines
    for engine in chosen:
        completion = generate(engine.url)
        assert completion.weight_version == seed + 1
        reference = log_probs_by_transformers(model, seed, completion.output_ids)
        # bf16 has 8 bits of mantissa: logits of about 4 are known to 1/64.
        tolerance = 1e-4 if "untied" not in model.name else 5e-2
        assert torch.allclose(torch.tensor(completion.log_probs), reference, atol=tolerance)


@pytest.mark.parametrize("model", ["tiny_qwen3"], indirect=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_update_without_any_weight_is_no_new_version_and_the_next_one_is(
    transport: str, model: Path, engines: list[EngineProcess], ranks: TrainerRanks
) -> None:
    both = engine_set(engines)
    ranks.push(transport, both, model, seed=5, version=5)
    held = both.weight_checksums()
    failures = ranks.push(transport, both, model, seed=6, fault="nothing")
    assert isinstance(failures[0], EngineError)
    assert "reports weight version 6 after the update to 7" in str(failures[0])
    assert isinstance(failures[1], Exception)
    assert both.weight_checksums() == held
    pushed = ranks.push(transport, both, model, seed=7)
    assert [version for version, _ in pushed] == [7, 7]
    expected = {name: checksum(tensor) for name, tensor in new_weights(model, 7).items()}
    assert both.weight_checksums() == [expected, expected]


@pytest.mark.parametrize("model", ["tiny_qwen3"], indirect=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_newcomer_gets_the_weights_and_version_of_the_others_which_go_on(
    transport: str, model: Path, engines: list[EngineProcess], ranks: TrainerRanks
) -> None:
    both = engine_set(engines)
    ranks.push(transport, both, model, seed=8, version=60)
    ranks.push(transport, engine_set(engines[1:]), model, seed=9, version=61)
    both.close()
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(generate, engines[0].url, max_new_tokens=400)
        wait_for(lambda: running_requests(engines[0].url) > 0 or long.done())
        newcomer = engine_set(engines[1:], newcomers=(1,))
        pushed = ranks.push(transport, newcomer, model, seed=8, version=61)
        assert [version for version, _ in pushed] == [61, 61]
        assert long.result().weight_version == 61
    assert [reported_version(engine.url) for engine in engines] == [61, 61]
    first, second = engine_set(engines).weight_checksums()
    assert first == second


FAILURES = {
    "shape": (EngineError, r"shape \[.*\] for a weight of"),
    "missing": (WeightMismatchError, "the trainer did not send it"),
    "overwrite": (WeightMismatchError, "1 of .* weights differ"),
    "raise": (ValueError, "the optimizer state is gone"),
    "raise-1": (RuntimeError, "failed on other ranks: .*rank 1 only"),
}
QUICK = {("colocated", "shape"), ("broadcast", "shape"), ("broadcast", "raise")}


@pytest.mark.parametrize("model", ["tiny_qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        pytest.param(t, f, marks=[] if (t, f) in QUICK else pytest.mark.full)
        for t in TRANSPORTS
        for f in FAILURES
    ],
)
def test_a_failed_update_raises_on_every_rank_and_the_next_one_heals(
    transport: str,
    fault: str,
    model: Path,
    engines: list[EngineProcess],
    ranks: TrainerRanks,
) -> None:
    kind, says = FAILURES[fault]
    both = engine_set(engines)
    before = reported_version(engines[0].url)
    start = time.monotonic()
    failures = ranks.push(transport, both, model, seed=2, fault=fault, version=before)
    assert time.monotonic() - start < 50, "the failure was only seen by a time-out"
    assert all(isinstance(error, Exception) for error in failures)
    with pytest.raises(kind, match=says):
        raise failures[0]
    assert leftover_segments(ranks) == []

    # Paused: no token of half-old, half-new weights; the version is that of the last end.
    with pytest.raises(EngineUnreachable, match=r"no answer within 0\.3 s"):
        generate(engines[0].url, timeout_s=0.3)
    ended = kind is WeightMismatchError
    assert reported_version(engines[0].url) == before + ended
    if not ended:
        with pytest.raises(EngineError, match="a weight update is open"):
            both.resume()

    healed = ranks.push(transport, both, model, seed=3)
    assert [version for version, _ in healed] == [before + 1, before + 1]
    completion = generate(engines[1].url)
    assert completion.weight_version == before + 1
    reference = log_probs_by_transformers(model, 3, completion.output_ids)
    assert torch.allclose(torch.tensor(completion.log_probs), reference, atol=1e-4)


@pytest.mark.parametrize("model", ["tiny_qwen3"], indirect=True)
def test_a_small_answer_is_not_held_back_for_an_acknowledgement(
    engines: list[EngineProcess],
) -> None:
    """Nagle's algorithm and delayed acknowledgements together cost 40 ms a call."""
    one = engine_set(engines[:1])
    one.pause("retract")
    seconds: list[float] = []
    for _ in range(50):
        start = time.perf_counter()
        one.flush_cache()
        seconds.append(time.perf_counter() - start)
    one.resume()
    assert min(seconds) < 0.035


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_hangs_or_dies_ends_the_update_in_time_and_a_new_one_heals_it(
    transport: str, tiny_qwen3: Path, tmp_path: Path, ranks: TrainerRanks
) -> None:
    engines = start_engines(tiny_qwen3, tmp_path, 2)
    try:
        impatient = engine_set(engines, timeout_s=3)
        how: dict[str, Any] = {"timeout_s": 3.0, "version": 0}
        pushed = ranks.push(transport, engine_set(engines), tiny_qwen3, seed=1, **how)
        assert [version for version, _ in pushed] == [1, 1]

        engines[1].process.send_signal(signal.SIGSTOP)
        failures = ranks.push(transport, impatient, tiny_qwen3, seed=2, timeout_s=3.0)
        assert all(isinstance(error, Exception) for error in failures)
        assert engines[1].url in str(failures[0])

        engines[1].process.kill()
        failures = ranks.push(transport, impatient, tiny_qwen3, seed=2, timeout_s=3.0)
        assert engines[1].url in str(failures[0])
        engines[1].process.wait()

        engines[1] = start_engines(tiny_qwen3, tmp_path / "again", 1)[0]
        replaced = engine_set(engines, generation=1)
        pushed = ranks.push(transport, replaced, tiny_qwen3, seed=3, timeout_s=3.0)
        assert [version for version, _ in pushed] == [2, 2]
        assert [generate(engine.url).weight_version for engine in engines] == [2, 2]
    finally:
        stop(engines)
