"""What the embedded engine adds to the protocol, and how its process starts and ends."""

import http.client
import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.backends.embedded import server
from miles.backends.embedded.api import MAX_BODY_BYTES
from miles.weight_sync.checksums import checksum
from tests.contract.conftest import ENGINE_ROWS
from tests.contract.test_engine_conformance import (
    ENDLESS,
    PROMPT,
    generate,
    greedy,
    left_running,
    start_long,
    threads,
)
from tests.engine_process import (
    EngineProcess,
    get,
    launch,
    post,
    running_requests,
    wait_for,
)

__all__ = ["threads"]

ADMISSION_TIMEOUT_S = 4
"""Of the second engine, which takes a dozen requests that are sent together, too."""


@pytest.fixture
def url(engine_url: str) -> Iterator[str]:
    with left_running(engine_url) as url:
        yield url


def bucket(name: str, tensor: torch.Tensor) -> tuple[shared_memory.SharedMemory, dict[str, Any]]:
    """A shared-memory segment with one tensor, and the update body that names it."""
    memory = shared_memory.SharedMemory(create=True, size=tensor.nbytes)
    torch.frombuffer(memory.buf, dtype=tensor.dtype).copy_(tensor.flatten())
    entry = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0]
    payload = {"shm": memory.name, "nbytes": tensor.nbytes, "entries": [entry]}
    return memory, {
        "load_format": "shm_bucket",
        "serialized_named_tensors": [json.dumps(payload)],
        "weight_version": 7,
    }


def send(url: str, name: str, tensor: torch.Tensor) -> Any:
    memory, body = bucket(name, tensor)
    try:
        return post(url, "/update_weights_from_tensor", body)
    finally:
        memory.close()
        memory.unlink()


@pytest.fixture(scope="module")
def weights(engine_model: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(engine_model).state_dict()


# Weights and memory


def test_the_server_says_what_it_is(url: str) -> None:
    info = get(url, "/server_info").json
    assert info["engine"] == "embedded"
    assert info["weight_formats"] == ["shm_bucket", "group", "disk"]
    assert (info["dtype"], info["tp_size"], info["context_length"]) == ("float32", 1, 2048)
    assert info["max_running_requests"] == ENGINE_ROWS


def test_a_bucket_in_shared_memory_changes_the_weight_and_its_checksum(
    url: str, weights: dict[str, torch.Tensor]
) -> None:
    name = "model.norm.weight"
    before = get_checksums(url)
    assert before == {key: checksum(value) for key, value in weights.items()}
    post(url, "/pause_generation", {"mode": "retract"})
    changed = weights[name] * 1.5
    assert send(url, name, changed).json["success"]
    assert get_checksums(url) == {**before, name: checksum(changed)}
    assert get(url, "/model_info").json["weight_version"] == "7"
    assert send(url, name, weights[name]).status == 200
    assert get_checksums(url) == before


def get_checksums(url: str) -> dict[str, str]:
    return post(url, "/weights_checker", {"action": "checksum"}).json["checksums"]


def test_weights_are_not_updated_while_the_engine_may_generate(
    url: str, weights: dict[str, torch.Tensor]
) -> None:
    answer = send(url, "model.norm.weight", weights["model.norm.weight"])
    assert answer.status == 400
    assert "pause_generation" in answer.json["message"]


def test_a_refused_bucket_changes_neither_weights_nor_version(url: str) -> None:
    post(url, "/pause_generation", {"mode": "retract"})
    version = get(url, "/model_info").json["weight_version"]
    before = get_checksums(url)
    answer = send(url, "model.norm.weight", torch.zeros(3))
    assert answer.status == 400
    assert answer.json["success"] is False
    assert "shape" in answer.json["message"]
    assert get(url, "/model_info").json["weight_version"] == version
    assert get_checksums(url) == before


def test_the_version_can_be_set_alone(url: str) -> None:
    assert post(url, "/update_weight_version", {"new_version": "12"}).status == 200
    assert generate(url, temperature=0, max_new_tokens=1)["meta_info"]["weight_version"] == "12"


def test_a_finished_sample_keeps_the_version_it_finished_under(
    url: str, threads: ThreadPoolExecutor
) -> None:
    """Tokens of an aborted request are of the weights that drew them, not of later ones."""
    post(url, "/update_weight_version", {"new_version": 20})
    future = start_long(url, threads, "spans", max_new_tokens=ENDLESS)
    post(url, "/pause_generation", {"mode": "in_place"})
    post(url, "/update_weight_version", {"new_version": 21})
    post(url, "/abort_request", {"rid": "spans"})
    assert future.result()["meta_info"]["weight_version"] == "20"


def test_released_memory_comes_back_and_needs_all_weights(
    url: str, engine_model: Path, threads: ThreadPoolExecutor
) -> None:
    expected = greedy(url, 8)
    post(url, "/pause_generation", {"mode": "retract"})
    assert post(url, "/release_memory_occupation").status == 200
    assert get(url, "/server_info").json["released"]
    refused = post(url, "/generate", {"input_ids": PROMPT})
    assert refused.status == 400
    assert "released" in refused.json["message"]
    disk = {"model_path": str(engine_model), "weight_version": 1}
    assert post(url, "/update_weights_from_disk", disk).status == 400
    assert post(url, "/resume_memory_occupation", {"tags": ["weights"]}).status == 200
    assert get(url, "/server_info").json["released"]  # the cache still is
    post(url, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    post(url, "/continue_generation")

    # No weight has been loaded: an error, never invented text.
    failed = post(url, "/generate", {"input_ids": PROMPT})
    assert failed.status == 500
    assert "not finite" in failed.json["message"]

    post(url, "/pause_generation", {"mode": "retract"})
    assert post(url, "/update_weights_from_disk", disk).status == 200
    post(url, "/continue_generation")
    assert greedy(url, 8) == expected
    assert post(url, "/resume_memory_occupation").status == 200  # nothing to do


def test_memory_is_not_released_under_running_requests(
    url: str, threads: ThreadPoolExecutor
) -> None:
    start_long(url, threads, max_new_tokens=ENDLESS)
    assert post(url, "/release_memory_occupation").status == 400
    assert post(url, "/flush_cache").status == 400


# Requests


def test_a_seed_fixes_the_samples_whatever_else_runs(url: str, threads: ThreadPoolExecutor) -> None:
    params: dict[str, Any] = {"temperature": 1, "max_new_tokens": 20, "ignore_eos": True}
    seeded = {**params, "n": 3, "sampling_seeds": [1, 2, 3]}
    alone = generate(url, **seeded)
    noise = [threads.submit(generate, url, [8, 9], **params) for _ in range(6)]
    again = generate(url, **seeded)
    single = generate(url, **params, sampling_seed=2)
    assert [s["output_ids"] for s in again] == [s["output_ids"] for s in alone]
    assert single["output_ids"] == alone[1]["output_ids"]
    assert all(future.result() for future in noise)


def test_more_samples_than_running_requests_are_all_answered(url: str) -> None:
    samples = generate(url, temperature=1, max_new_tokens=2, n=3 * ENGINE_ROWS + 1, ignore_eos=True)
    assert len(samples) == 3 * ENGINE_ROWS + 1
    assert all(len(sample["output_ids"]) == 2 for sample in samples)


def test_a_request_that_exceeds_the_context_is_refused_with_both_numbers(url: str) -> None:
    body = {"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 49}}
    answer = post(url, "/generate", body)
    assert answer.status == 400
    assert (
        "2000 prompt tokens and max_new_tokens 49 exceed the context length 2048"
        in (answer.json["message"])
    )


def test_a_token_outside_the_vocabulary_is_refused(url: str) -> None:
    answer = post(url, "/generate", {"input_ids": [5, 10**6], "sampling_params": {}})
    assert answer.status == 400
    assert "1000000 is not a token id" in answer.json["message"]


def test_a_request_id_that_is_running_is_refused(url: str, threads: ThreadPoolExecutor) -> None:
    start_long(url, threads, "twice", max_new_tokens=ENDLESS)
    body = {"input_ids": PROMPT, "rid": "twice"}
    answer = post(url, "/generate", body)
    assert answer.status == 400
    assert "'twice' is running" in answer.json["message"]


def test_the_request_of_a_client_that_goes_away_is_aborted(url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    params = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params}
    start = time.monotonic()
    assert post(url, "/generate", body).status == 200
    whole_s = time.monotonic() - start
    connection.request("POST", "/generate", json.dumps(body))
    wait_for(lambda: running_requests(url) == 1)
    connection.close()
    start = time.monotonic()
    wait_for(lambda: running_requests(url) == 0, 10)
    assert time.monotonic() - start < whole_s / 2


def test_a_body_that_is_too_large_is_refused(url: str) -> None:
    answer = post(url, "/generate", b"[" + b" " * MAX_BODY_BYTES + b"]")
    assert answer.status == 413


def test_an_admission_that_stays_incomplete_is_refused_and_blocks_nobody(
    second_engine: EngineProcess,
) -> None:
    url = second_engine.url
    start = time.monotonic()
    answer = post(url, "/generate", {"input_ids": PROMPT, "admission": ["lonely", 0, 2]})
    assert ADMISSION_TIMEOUT_S <= time.monotonic() - start < 60
    assert answer.status == 400
    assert "1 of 2 requests did not come within 4 s (positions 1)" in answer.json["message"]
    assert len(greedy(url, 2)) == 2


# Determinism over processes; starting and ending


@pytest.fixture(scope="module")
def parent() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def second_engine(
    engine_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    parent: "subprocess.Popen[bytes]",
) -> Iterator[EngineProcess]:
    """On IPv6, with another parent, and quick to give up an incomplete admission."""
    limits = {"--max-running-requests": ENGINE_ROWS, "--admission-timeout-s": ADMISSION_TIMEOUT_S}
    options = [str(word) for pair in limits.items() for word in pair]
    folder = tmp_path_factory.mktemp("second")
    engine = launch(engine_model, folder, "--host", "::1", *options, parent=parent.pid)
    try:
        yield engine.wait_ready()
    finally:
        engine.stop()


def test_admitted_and_seeded_requests_are_bit_equal_in_two_servers(
    url: str, second_engine: EngineProcess
) -> None:
    """More sequences than rows, prompts and limits of different lengths, another arrival order."""

    def body(position: int) -> dict[str, Any]:
        params = {
            "temperature": 0.9,
            "top_p": 0.95 if position % 3 else 1.0,
            "max_new_tokens": 5 + 7 * (position % 4),
            "n": 4,
            "sampling_seeds": [100 * position + i for i in range(4)],
        }
        return {
            "input_ids": [(3 * position + i) % 90 for i in range(1 + position % 5)],
            "sampling_params": params,
            "return_logprob": True,
            "admission": ["rollout 3", position, 12],
        }

    def run(url: str, order: list[int]) -> list[Any]:
        with ThreadPoolExecutor(12) as pool:
            futures = {}
            for position in order:
                futures[position] = pool.submit(post, url, "/generate", body(position))
            answers = [futures[position].result().json for position in range(12)]
        return [
            [(s["output_ids"], s["meta_info"]["output_token_logprobs"]) for s in answer]
            for answer in answers
        ]

    first = run(url, list(range(12)))
    second = run(second_engine.url, list(range(11, -1, -1)))
    assert first == second
    assert all(math.isfinite(p[0]) for answer in first for _, pairs in answer for p in pairs)


def test_servers_get_ports_of_their_own_and_ipv6_urls_have_brackets(
    url: str, second_engine: EngineProcess
) -> None:
    assert second_engine.url.startswith("http://[::1]:")
    assert urlsplit(second_engine.url).port != urlsplit(url).port
    ready = json.loads(second_engine.ready_file.read_text())
    assert ready == {"url": second_engine.url, "pid": second_engine.process.pid}


def test_the_server_ends_with_its_parent(
    second_engine: EngineProcess, parent: "subprocess.Popen[bytes]"
) -> None:
    assert second_engine.process.poll() is None
    parent.kill()
    parent.wait()
    assert second_engine.process.wait(60) == 1
    assert "the parent process ended" in second_engine.log


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_only_one_address_of_this_machine_is_bound(
    host: str, engine_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.main(["--model-path", str(engine_model), "--host", host]) == 2
    assert f"--host {host}" in capsys.readouterr().err


def test_a_port_in_use_is_named_with_the_remedy(
    engine_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert server.main(["--model-path", str(engine_model), "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"--port {port}" in error
    assert "0 takes a free port" in error


def test_a_model_that_cannot_be_served_ends_the_server_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.main(["--model-path", str(tmp_path), "--parent-pid", str(os.getpid())]) == 1
    assert "has no config.json" in capsys.readouterr().err
