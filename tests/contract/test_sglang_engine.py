"""Released SGLang as a job's engine: weights that reach it, checks of them, its processes' end."""

import contextlib
import http.client
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from miles.backends.sglang_utils.package import UNSERVED_TOKENS
from miles.core import hf
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.fused import FusedDigests, fuse_table
from miles.weight_sync.session import WeightMismatchError
from tests.contract.test_weight_sync import (
    TRANSPORTS,
    generate,
    log_probs_by_transformers,
    ranks,
    reported_version,
)
from tests.contract.trainer_ranks import TrainerRanks, new_weights
from tests.engine_process import (
    EngineProcess,
    ending,
    get,
    launch_sglang,
    post,
    wait_for,
    wait_idle,
)
from tests.unit.backends.fsdp_utils.made_families import FAMILIES, make_family

__all__ = ["ranks"]
pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def engine(sglang_engine: EngineProcess, engine_model: Path) -> Iterator[EngineProcess]:
    """The shared one; other tests get it back with the weights of ``engine_model``."""
    yield sglang_engine
    load_from_disk(sglang_engine, engine_model)


def engine_set(*engines: EngineProcess) -> HttpEngineSet:
    return HttpEngineSet(tuple(engine.url for engine in engines), timeout_s=60)


def push(
    ranks: TrainerRanks, transport: str, *args: Any, **how: Any
) -> tuple[int, dict[str, float]]:
    """The version and timings of rank 0."""
    answer = ranks.push(transport, *args, **how)[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def expected_digests(model: Path, seed: int) -> dict[str, str]:
    """SGLang's own digests, had it loaded the weights of ``seed`` from a checkpoint."""
    config = hf.load_config(str(model))
    table = fuse_table(config)
    assert table is not None
    digests = FusedDigests(table, config.dtype)
    for name, tensor in new_weights(model, seed).items():
        digests.add(name, tensor)
    return dict(digests.result())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_new_weights_arrive_bit_for_bit_and_sglang_generates_from_them(
    transport: str, engine: EngineProcess, engine_model: Path, ranks: TrainerRanks
) -> None:
    seed = 20 + TRANSPORTS.index(transport)
    version, timings = push(
        ranks, transport, engine_set(engine), engine_model, seed=seed, version=seed
    )
    assert version == seed + 1
    assert timings.keys() >= {"gather", "digest", "send", "check", "resume"}
    assert reported_version(engine.url) == seed + 1
    completion = generate(engine.url)
    assert completion.weight_version == seed + 1
    reference = log_probs_by_transformers(engine_model, seed, completion.output_ids)
    assert torch.allclose(torch.tensor(completion.log_probs), reference, atol=1e-4)


def load_from_disk(engine: EngineProcess, model: Path) -> None:
    post(engine.url, "/pause_generation", {"mode": "abort"})
    wait_idle(engine.url)
    update = {"model_path": str(model), "weight_version": "default"}
    assert post(engine.url, "/update_weights_from_disk", update).json["success"]
    post(engine.url, "/continue_generation")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sglang_finds_the_same_weights_in_a_push_and_in_the_checkpoint_of_them(
    transport: str, engine: EngineProcess, engine_model: Path, ranks: TrainerRanks, tmp_path: Path
) -> None:
    """By the digests of its own checker, of its own fused parameters."""
    one = engine_set(engine)
    export = shutil.copytree(engine_model, tmp_path / "export")
    save_file(new_weights(engine_model, 41), export / "model.safetensors", {"format": "pt"})
    push(ranks, transport, one, engine_model, seed=41, version=41)
    pushed = one.weight_checksums()
    push(ranks, transport, one, engine_model, seed=42, version=42)
    assert all(one.weight_checksums()[0][name] != digest for name, digest in pushed[0].items())
    load_from_disk(engine, export)
    assert one.weight_checksums() == pushed


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_weight_that_differs_is_noticed_and_the_next_update_heals_it(
    transport: str, engine: EngineProcess, engine_model: Path, ranks: TrainerRanks
) -> None:
    one = engine_set(engine)
    failures = ranks.push(transport, one, engine_model, seed=2, fault="overwrite", version=7)
    with pytest.raises(WeightMismatchError, match=r"1 of \d+ weights differ"):
        raise failures[0]
    assert push(ranks, transport, one, engine_model, seed=3)[0] == 8
    assert one.weight_checksums() == [expected_digests(engine_model, 3)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_weight_that_was_not_sent_is_noticed(
    transport: str, engine: EngineProcess, engine_model: Path, ranks: TrainerRanks
) -> None:
    one = engine_set(engine)
    failures = ranks.push(transport, one, engine_model, seed=2, fault="missing", version=11)
    with pytest.raises(WeightMismatchError, match=r"sent \d of \d parts|did not send it"):
        raise failures[0]
    assert push(ranks, transport, one, engine_model, seed=3)[0] == 12


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_part_with_a_row_too_many_which_sglang_cuts_off_is_noticed(
    transport: str, engine: EngineProcess, engine_model: Path, ranks: TrainerRanks
) -> None:
    one = engine_set(engine)
    failures = ranks.push(transport, one, engine_model, seed=2, fault="shape", version=13)
    with pytest.raises(WeightMismatchError, match="qkv_proj"):
        raise failures[0]
    assert push(ranks, transport, one, engine_model, seed=3)[0] == 14


def test_the_longest_input_is_as_much_shorter_than_the_context_as_is_known(
    engine: EngineProcess, engine_model: Path
) -> None:
    context = hf.context_length(hf.load_config(str(engine_model)))
    assert context is not None
    assert get(engine.url, "/server_info").json["max_req_input_len"] == context - UNSERVED_TOKENS
    for length, status in ((context - UNSERVED_TOKENS, 400), (context - UNSERVED_TOKENS - 1, 200)):
        body = {"input_ids": [5] * length, "sampling_params": {"max_new_tokens": 1}}
        assert post(engine.url, "/generate", body).status == status


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "qwen3_moe"])
def test_every_family_of_the_table_is_fused_as_it_says(
    name: str, tmp_path: Path, ranks: TrainerRanks
) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    # SGLang pads smaller sizes on a CPU, and makes every layer of Qwen3-MoE one of experts.
    served = {"intermediate_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}
    model = make_family(tmp_path, replace(family, settings={**family.settings, **served}))
    with ending(launch_sglang(model, tmp_path / "engine")) as engine:
        for transport in TRANSPORTS:
            seed = TRANSPORTS.index(transport)
            how = {"seed": seed, "version": seed}
            assert push(ranks, transport, engine_set(engine), model, **how)[0] == seed + 1
        completion = generate(engine.url)
        reference = log_probs_by_transformers(model, seed, completion.output_ids)
        assert torch.allclose(torch.tensor(completion.log_probs), reference, atol=1e-4)


@pytest.mark.full
def test_two_engines_load_the_same_buckets(
    engine: EngineProcess, engine_model: Path, tmp_path: Path, ranks: TrainerRanks
) -> None:
    with ending(launch_sglang(engine_model, tmp_path / "engine")) as other:
        both = engine_set(engine, other)
        for transport in TRANSPORTS:
            assert push(ranks, transport, both, engine_model, seed=5, version=30)[0] == 31
            assert both.weight_checksums() == [expected_digests(engine_model, 5)] * 2


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def ended(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.full
def test_every_process_ends_with_the_owner_or_at_a_signal(
    engine_model: Path, tmp_path: Path
) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    engines = [
        launch_sglang(engine_model, tmp_path / "owned", parent=owner.pid),
        launch_sglang(engine_model, tmp_path / "signalled"),
        launch_sglang(engine_model, tmp_path / "killed"),
    ]
    try:
        trees = [tree(engine.wait_ready().process.pid) for engine in engines]
        assert all(len(each) > 2 for each in trees)
        start = time.monotonic()
        owner.kill()
        owner.wait()
        # With a request that a paused engine will not finish.
        post(engines[1].url, "/pause_generation", {"mode": "retract"})
        request = threading.Thread(target=ignored_request, args=(engines[1].url,), daemon=True)
        request.start()
        engines[1].process.send_signal(signal.SIGTERM)
        engines[2].process.kill()
        wait_for(lambda: all(ended(each) for each in trees), 10)
        assert time.monotonic() - start < 10
        assert [engine.process.wait(5) for engine in engines] == [1, 0, -signal.SIGKILL]
    finally:
        for engine in engines:
            engine.process.kill()
        owner.kill()


def ignored_request(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(url, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 9}})


@pytest.mark.full
def test_a_server_that_cannot_load_ends_and_says_why(engine_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(engine_model, broken)
    (broken / "model.safetensors").unlink()
    engine = launch_sglang(broken, tmp_path / "engine")
    assert engine.process.wait(200) != 0
    assert "Cannot find any model weights" in engine.log
    assert not engine.ready_file.exists()
