"""The engine without HTTP: whole generations under churn, failures, and what it loads."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from miles.backends.embedded.engine import Engine, EngineSettings
from miles.backends.embedded.protocol import (
    CheckBody,
    DiskUpdateBody,
    Empty,
    Failed,
    GenerateBody,
    MemoryBody,
    PauseBody,
    Refused,
    Sampling,
)
from miles.backends.embedded.requests import Request
from miles.weight_sync.checksums import checksum
from scripts.made_models import make_qwen3_moe
from tests.contract.conftest import SharpModels

Outcome = tuple[Request, Exception | None]


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SharpModels(tolerance=0.0).write(tmp_path_factory.mktemp("models") / "sharp", seed=1)


@pytest.fixture
def make_engine(sharp_model: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(path: Path = sharp_model, **settings: Any) -> Engine:
        engines.append(Engine(EngineSettings(model_path=str(path), **settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.stop(10)
        assert not engine.scheduler.alive


def submit(engine: Engine, bodies: list[GenerateBody]) -> "queue.Queue[Outcome]":
    """Hand all over between two steps."""
    outcomes: queue.Queue[Outcome] = queue.Queue()
    requests = [
        engine.prepare(body, f"r{i}", lambda request, error: outcomes.put((request, error)))
        for i, body in enumerate(bodies)
    ]

    def accept() -> None:
        for request in requests:
            engine.scheduler.accept(request)

    engine.scheduler.post(accept)
    return outcomes


def results(outcomes: "queue.Queue[Outcome]", count: int) -> list[Outcome]:
    found = [outcomes.get(timeout=60) for _ in range(count)]
    return sorted(found, key=lambda outcome: int(outcome[0].rid[1:]))


def test_every_token_and_log_prob_is_right_while_rows_come_and_go(
    make_engine: Callable[..., Engine], sharp_model: Path
) -> None:
    """Prompts, limits and sample counts of all sizes through few slots: slabs grow, rows move."""
    engine = make_engine(max_running_requests=7)
    model = AutoModelForCausalLM.from_pretrained(sharp_model).eval()
    bodies = [
        GenerateBody(
            input_ids=[(5 * i + j * j) % 90 for j in range(1 + 11 * i % 40)],
            sampling_params=Sampling(
                temperature=0 if i % 2 else 0.8,
                n=1 + i % 3,
                max_new_tokens=3 + 29 * i % 71,
                ignore_eos=True,
                sampling_seed=i,
            ),
        )
        for i in range(24)
    ]
    for request, error in results(submit(engine, bodies), len(bodies)):
        assert error is None
        temperature = request.params.temperature or 1.0
        for sequence in request.sequences:
            assert len(sequence.output_ids) == request.params.max_new_tokens
            ids = [*request.input_ids, *sequence.output_ids]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[
                    0, len(request.input_ids) - 1 :
                ]
            log_probs = torch.log_softmax(logits[:-1] / temperature, -1)
            output = torch.tensor(sequence.output_ids)
            if request.params.temperature == 0:
                assert output.tolist() == log_probs.argmax(-1).tolist()
            torch.testing.assert_close(
                torch.tensor(sequence.log_probs),
                log_probs.gather(1, output[:, None])[:, 0],
                atol=1e-5,
                rtol=0,
            )


def test_a_step_that_fails_fails_its_requests_and_no_other(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_running_requests=2)
    params = Sampling(temperature=0, max_new_tokens=4, ignore_eos=True)
    bodies = [GenerateBody(input_ids=[5, 6, 7 + i], sampling_params=params) for i in range(4)]
    embedding = engine.scheduler.runner.model.get_input_embeddings()
    calls = 0

    def explode(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of luck")

    handle = embedding.register_forward_pre_hook(explode)
    outcomes = results(submit(engine, bodies), 4)
    handle.remove()
    for _, error in outcomes[:2]:
        assert isinstance(error, Failed)
        assert "RuntimeError: out of luck" in str(error)
    assert [error for _, error in outcomes[2:]] == [None, None]
    again = results(submit(engine, bodies), 4)
    assert [error for _, error in again] == [None] * 4
    for (before, _), (after, _) in zip(outcomes[2:], again[2:], strict=True):
        assert before.sequences[0].output_ids == after.sequences[0].output_ids


def no_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_host_memory() -> None:
    torch.empty(1 << 50)


@pytest.mark.parametrize("ask", [no_device_memory, no_host_memory])
def test_an_engine_out_of_memory_ends_instead_of_answering(
    make_engine: Callable[..., Engine], ask: Callable[[], None]
) -> None:
    engine = make_engine(max_running_requests=2)
    embedding = engine.scheduler.runner.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda *_: ask())
    params = Sampling(temperature=0, max_new_tokens=4)
    outcomes = submit(engine, [GenerateBody(input_ids=[5, 6], sampling_params=params)])
    engine.scheduler._thread.join(30)  # pyright: ignore[reportPrivateUsage]
    assert not engine.scheduler.alive
    assert outcomes.empty()
    with pytest.raises(Failed, match="shutting down"):
        engine.scheduler.post(lambda: None)


def test_a_retracted_batch_goes_on_with_the_same_tokens(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_running_requests=6)
    params = Sampling(temperature=1, n=3, max_new_tokens=40, ignore_eos=True, sampling_seed=4)
    bodies = [GenerateBody(input_ids=[5, 6 + i], sampling_params=params) for i in range(3)]
    quiet = [[s.output_ids for s in r.sequences] for r, _ in results(submit(engine, bodies), 3)]
    outcomes = submit(engine, bodies)
    for _ in range(5):
        engine.run(engine.scheduler.retract).result(30)
    disturbed = [[s.output_ids for s in r.sequences] for r, _ in results(outcomes, 3)]
    assert disturbed == quiet


@pytest.mark.parametrize("ids", [[], [-1], [96], [5, 10**20]])
def test_ids_that_are_no_tokens_are_refused(
    make_engine: Callable[..., Engine], ids: list[int]
) -> None:
    engine = make_engine()
    with pytest.raises(Refused, match=r"empty|not a token id"):
        engine.prepare(GenerateBody(input_ids=ids), "r", lambda request, error: None)


def test_a_request_that_can_never_fit_into_the_cache_is_refused(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_total_tokens=30)
    body = GenerateBody(input_ids=[5] * 10, sampling_params=Sampling(max_new_tokens=21))
    ((_, error),) = results(submit(engine, [body]), 1)
    assert isinstance(error, Refused)
    assert "do not fit into the cache (30 tokens)" in str(error)


def test_the_checkpoint_decides_dtype_and_end_tokens_unless_told_otherwise(
    make_engine: Callable[..., Engine], tiny_qwen3_untied: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in tiny_qwen3_untied.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    GenerationConfig(eos_token_id=[3, 7]).save_pretrained(copied)
    engine = make_engine(copied)
    assert engine.dtype == "bfloat16"
    request = engine.prepare(
        GenerateBody(input_ids=[5], sampling_params=Sampling(stop_token_ids=[9])),
        "r",
        lambda request, error: None,
    )
    assert request.stop_token_ids == [1, 3, 7, 9]  # 1: <eos> of config and tokenizer
    outcomes = submit(engine, [GenerateBody(input_ids=[5, 6], sampling_params=Sampling(n=2))])
    assert outcomes.get(timeout=60)[1] is None
    assert make_engine(copied, dtype="float32").dtype == "float32"


@pytest.mark.parametrize("length", [1, 4096])
def test_a_context_length_beyond_the_model_is_refused(
    make_engine: Callable[..., Engine], length: int
) -> None:
    with pytest.raises(ValueError, match=r"--context-length .* must be 2 to 2048"):
        make_engine(context_length=length)


def test_experts_arrive_one_by_one_and_generate(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """The checkpoint's names; transformers holds all experts of a layer in one parameter."""
    engine = make_engine(make_qwen3_moe(tmp_path / "old", dense_layers=(1,)))
    newer = make_qwen3_moe(tmp_path / "new", dense_layers=(1,), seed=1)
    stored = load_file(newer / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in stored

    def update() -> Any:
        engine.pause(PauseBody())
        engine.release_memory(MemoryBody(tags=["weights"]))
        engine.resume_memory(MemoryBody(tags=["weights"]))
        engine.update_from_disk(DiskUpdateBody(model_path=str(newer)))
        engine.resume(Empty())
        return engine.check_weights(CheckBody(action="checksum"))

    found = engine.run(update).result(60)["checksums"]
    assert found == {name: checksum(tensor) for name, tensor in stored.items()}

    params = Sampling(temperature=0, max_new_tokens=6, ignore_eos=True)
    body = GenerateBody(input_ids=[5, 17, 30, 9], sampling_params=params)
    ((request, error),) = results(submit(engine, [body]), 1)
    assert error is None
    (sequence,) = request.sequences
    model = AutoModelForCausalLM.from_pretrained(newer).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 17, 30, 9, *sequence.output_ids]])).logits[0, 3:-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence.output_ids)[:, None])
    torch.testing.assert_close(torch.tensor(sequence.log_probs), expected[:, 0], atol=1e-5, rtol=0)
