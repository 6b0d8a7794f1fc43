"""The client against a server that gives written-down answers of the protocol."""

import asyncio
import json
import math
import pickle
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from miles.contracts.engine import (
    EngineError,
    EngineFeatures,
    FlattenedRef,
    GenerateRequest,
    GroupRef,
    SamplingParams,
    ShmRef,
    WeightGroup,
)
from miles.contracts.types import TensorSpec
from miles.rollout.engine_client import EngineClient, EngineUnreachable, http_url
from miles.rollout.engine_set import EngineAddresses, HttpEngineSet


class Server:
    """Answers each path with what the test wrote down, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.queries: list[str] = []
        self.delay_s = 0.0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def body(self, path: str) -> Any:
        return next(body for _, asked, body in self.asked if asked == path)

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = http_url("127.0.0.1", self._runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        path = request.path.removeprefix("/")
        self.queries.append(request.query_string)
        self.asked.append((request.method, path, json.loads(text) if text else None))
        await asyncio.sleep(self.delay_s)
        status, answer = self.answers.get(path, (404, {"detail": "Not Found"}))
        if not isinstance(answer, str):
            answer = json.dumps(answer)
        return web.Response(status=status, text=answer)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def ask[T](
    server: Server, call: Callable[[EngineClient], Awaitable[T]], timeout_s: float = 10
) -> T:
    async def main() -> T:
        client = EngineClient(server.url, timeout_s=timeout_s)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(main())


def request(n: int = 1, **extra: Any) -> GenerateRequest:
    params = SamplingParams(temperature=0.6, max_new_tokens=4, stop=("\n",), **extra)
    return GenerateRequest(input_ids=[5, 6], params=params, n=n, rid="r1")


def generated(**meta: Any) -> dict[str, Any]:
    return {
        "text": "ab",
        "output_ids": [7, 8],
        "meta_info": {
            "output_token_logprobs": [[-0.5, 7, None], [None, 8, "b"]],
            "finish_reason": {"type": "stop", "matched": 8},
            "weight_version": "3",
            "cached_tokens": 2,
            "prompt_tokens": 2,
            **meta,
        },
    }


def test_a_generate_request_is_sent_in_sglangs_fields_and_its_answer_read(server: Server) -> None:
    server.answers["generate"] = (200, generated())
    (completion,) = ask(server, lambda c: c.generate(request()))
    assert server.body("generate") == {
        "input_ids": [5, 6],
        "sampling_params": {
            "n": 1,
            "temperature": 0.6,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "stop": ["\n"],
            "stop_token_ids": [],
            "skip_special_tokens": False,
            "ignore_eos": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "rid": "r1",
    }
    assert completion.output_ids == (7, 8)
    assert completion.log_probs[0] == -0.5
    assert math.isnan(completion.log_probs[1])
    assert completion.text == "ab"
    assert completion.finish_reason == "stop"
    assert completion.weight_version == 3
    assert completion.cached_tokens == 2


def test_our_extensions_are_sent_when_set(server: Server) -> None:
    server.answers["generate"] = (200, [generated(), generated(weight_version=4)])
    asked = GenerateRequest(
        input_ids=(1,),
        params=SamplingParams(max_new_tokens=1, sampling_seeds=(11, 12)),
        n=2,
        admission=("rollout-0", 3, 8),
    )
    completions = ask(server, lambda c: c.generate(asked))
    assert [c.weight_version for c in completions] == [3, 4]
    body = server.body("generate")
    assert body["sampling_params"]["sampling_seeds"] == [11, 12]
    assert body["admission"] == ["rollout-0", 3, 8]
    assert "rid" not in body


def test_an_aborted_request_without_tokens_is_an_empty_completion(server: Server) -> None:
    answer = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
    server.answers["generate"] = (200, answer)
    (completion,) = ask(server, lambda c: c.generate(request()))
    assert (completion.output_ids, completion.log_probs) == ((), ())
    assert completion.finish_reason == "abort"


def test_weights_that_were_never_updated_are_version_0(server: Server) -> None:
    server.answers["model_info"] = (200, {"weight_version": "default", "model_path": "m"})
    assert ask(server, EngineClient.weight_version) == 0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, "boom"), "status 500: boom"),
        ((400, {"error": {"message": "n must be positive"}}), "n must be positive"),
        ((200, "not json"), "malformed answer"),
        ((200, {"text": "no meta"}), "malformed answer.*meta_info"),
        ((200, [generated(), generated()]), "2 completions for n=1"),
    ],
)
def test_a_failed_generate_names_url_call_status_and_answer(
    server: Server, answer: tuple[int, Any], says: str
) -> None:
    server.answers["generate"] = answer
    with pytest.raises(EngineError, match=says) as caught:
        ask(server, lambda c: c.generate(request()))
    assert f"{server.url}/generate" in str(caught.value)
    assert not isinstance(caught.value, EngineUnreachable)


def test_success_false_is_a_failure_even_with_status_200(server: Server) -> None:
    server.answers["update_weights_from_disk"] = (200, {"success": False, "message": "no such dir"})
    with pytest.raises(EngineError, match="update_weights_from_disk: failed: no such dir"):
        ask(server, lambda c: c.load_disk("/nowhere", 1))


def test_a_refused_connection_and_a_time_out_are_unreachable(server: Server) -> None:
    server.answers["health"] = (200, {})
    server.delay_s = 60.0
    start = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"/health: no answer within 0\.2 s"):
        ask(server, lambda c: c.health(0.2))
    assert time.monotonic() - start < 50

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = http_url("127.0.0.1", closed.getsockname()[1])
        with pytest.raises(EngineUnreachable, match=f"{url}/health"):
            asyncio.run(_health(url))


async def _health(url: str) -> None:
    client = EngineClient(url, timeout_s=5)
    try:
        await client.health()
    finally:
        await client.close()


async def update_to_7(client: EngineClient) -> None:
    for _ in range(2):
        await client.begin_weight_update()
        await client.end_weight_update(7)


def test_update_sessions_are_used_where_the_server_has_them(server: Server) -> None:
    server.answers["begin_weight_update"] = (200, {"success": True})
    server.answers["end_weight_update"] = (200, {"success": True})
    server.answers["model_info"] = (200, {"weight_version": "7"})
    ask(server, update_to_7)
    assert [path for _, path, _ in server.asked] == [
        *("begin_weight_update", "end_weight_update", "model_info") * 2
    ]


def test_a_server_without_update_sessions_is_asked_once(server: Server) -> None:
    server.answers["model_info"] = (200, {"weight_version": "7"})
    ask(server, update_to_7)
    assert [path for _, path, _ in server.asked] == [
        "begin_weight_update",
        "model_info",
        "model_info",
    ]


def test_an_engine_that_reports_another_version_after_the_update_is_an_error(
    server: Server,
) -> None:
    server.answers["model_info"] = (200, {"weight_version": "6"})
    with pytest.raises(EngineError, match="reports weight version 6 after the update to 7"):
        ask(server, update_to_7)


def test_an_update_session_that_is_refused_is_an_error(server: Server) -> None:
    server.answers["begin_weight_update"] = (400, {"message": "already open"})
    with pytest.raises(EngineError, match=r"status 400.*already open"):
        ask(server, EngineClient.begin_weight_update)


def test_buckets_are_sent_by_reference(server: Server) -> None:
    server.answers["update_weights_from_tensor"] = (200, {"success": True, "message": "ok"})
    server.answers["update_weights_from_distributed"] = (200, {"success": True, "message": "ok"})
    spec = TensorSpec(name="a", dtype="bfloat16", shape=(2, 3))

    async def load(client: EngineClient) -> None:
        await client.load(ShmRef(shm_name="psm_1", num_bytes=140, entries=((spec, 128),)), 5)
        await client.load(GroupRef(group_name="g", entries=(spec, spec)), 6)

    ask(server, load)
    tensor = server.body("update_weights_from_tensor")
    (payload,) = tensor.pop("serialized_named_tensors")
    assert json.loads(payload) == {
        "shm": "psm_1",
        "nbytes": 140,
        "entries": [["a", "bfloat16", [2, 3], 128]],
    }
    assert tensor == {"load_format": "shm_bucket", "flush_cache": False, "weight_version": "5"}
    assert server.body("update_weights_from_distributed") == {
        "names": ["a", "a"],
        "dtypes": ["bfloat16", "bfloat16"],
        "shapes": [[2, 3], [2, 3]],
        "group_name": "g",
        "flush_cache": False,
        "weight_version": "6",
    }


def test_sglang_is_told_from_the_embedded_engine_by_what_it_advertises_and_asked_once(
    server: Server,
) -> None:
    server.answers["server_info"] = (200, {"dtype": "bfloat16", "weight_formats": ["shm_bucket"]})

    async def twice(client: EngineClient) -> list[EngineFeatures]:
        return [await client.features(), await client.features()]

    embedded = EngineFeatures(weight_format="shm_bucket", dtype="bfloat16", checksums="tensors")
    assert ask(server, twice) == [embedded, embedded]
    assert len(server.asked) == 1
    server.answers["server_info"] = (200, {"dtype": "float32", "tp_size": 1})
    sglang = EngineFeatures(weight_format="flattened_bucket", dtype="float32", checksums="fused")
    assert ask(server, twice) == [sglang, sglang]


def test_a_bucket_for_sglang_has_a_handle_for_each_of_its_ranks(server: Server) -> None:
    server.answers["update_weights_from_tensor"] = (200, {"success": True, "message": "ok"})
    ask(server, lambda client: client.load(FlattenedRef(serialized=("a", "b")), 5))
    assert server.body("update_weights_from_tensor") == {
        "load_format": "flattened_bucket",
        "serialized_named_tensors": ["a", "b"],
        "flush_cache": False,
        "weight_version": "5",
    }


def of_a_rank(rank: int, size: int, digest: str) -> dict[str, Any]:
    layout = {"tp_rank": rank, "tp_size": size, "dp_rank": 0, "dp_size": 1}
    return {"checksums": {"a": digest}, "per_gpu_checksum": "aa", "parallelism_info": layout}


def test_sglangs_checksums_are_those_of_its_tensor_parallel_ranks(server: Server) -> None:
    def answer(*ranks: dict[str, Any]) -> None:
        server.answers["weights_checker"] = (200, {"success": True, "ranks": list(ranks)})

    answer(of_a_rank(0, 1, "f0"))
    assert ask(server, EngineClient.weight_checksums) == {"a": "f0"}
    answer(of_a_rank(1, 2, "f1"), of_a_rank(0, 2, "f0"))
    found = ask(server, EngineClient.weight_checksums)
    assert found == {"a of rank 0": "f0", "a of rank 1": "f1"}
    answer(of_a_rank(0, 1, "f0"), of_a_rank(0, 1, "f0"))
    with pytest.raises(EngineError, match="one group of such ranks alone"):
        ask(server, EngineClient.weight_checksums)


def test_the_other_calls_use_sglangs_paths_and_fields(server: Server) -> None:
    ok = (200, {"success": True})
    server.answers |= {
        "pause_generation": ok,
        "continue_generation": ok,
        "flush_cache": (200, "Cache flushed.\n"),
        "abort_request": (200, ""),
        "weights_checker": (200, {"success": True, "checksums": {"a": "ff"}}),
        "server_info": (200, {"weight_formats": ["shm_bucket"]}),
        "destroy_weights_update_group": ok,
        "release_memory_occupation": (200, "null"),
        "resume_memory_occupation": (200, "null"),
    }

    async def calls(client: EngineClient) -> None:
        await client.pause("retract")
        await client.flush_cache()
        await client.abort("r1")
        await client.abort()
        assert await client.weight_checksums() == {"a": "ff"}
        assert (await client.server_info())["weight_formats"] == ["shm_bucket"]
        await client.destroy_weight_group("g")
        await client.release_memory(["kv_cache", "weights"])
        await client.resume_memory(["weights"])
        await client.resume()

    ask(server, calls)
    assert server.asked == [
        ("POST", "pause_generation", {"mode": "retract"}),
        ("POST", "flush_cache", {}),
        ("POST", "abort_request", {"rid": "r1"}),
        ("POST", "abort_request", {"abort_all": True}),
        ("POST", "weights_checker", {"action": "checksum"}),
        ("GET", "server_info", None),
        ("POST", "destroy_weights_update_group", {"group_name": "g"}),
        ("POST", "release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("POST", "resume_memory_occupation", {"tags": ["weights"]}),
        ("POST", "continue_generation", {}),
    ]


def test_a_flush_that_an_engine_with_requests_refuses_fails_only_where_it_must(
    server: Server,
) -> None:
    server.answers["flush_cache"] = (400, "Flush cache failed.\n")

    async def flush(client: EngineClient) -> None:
        await client.flush_cache(unless_busy=True)
        with pytest.raises(EngineError, match="flush_cache: status 400: Flush cache failed"):
            await client.flush_cache()

    ask(server, flush)
    # What is not to be there is given a moment to go.
    assert server.queries == ["", "timeout=5"]
    server.answers["flush_cache"] = (500, "broken")
    with pytest.raises(EngineError, match="status 500"):
        ask(server, lambda client: client.flush_cache(unless_busy=True))


def test_what_still_runs_when_an_engine_is_to_be_idle_is_aborted(server: Server) -> None:
    server.answers |= {"flush_cache": (200, "Cache flushed.\n"), "abort_request": (200, "")}
    ask(server, lambda client: client.drain(0.5))
    assert [path for _, path, _ in server.asked] == ["flush_cache"]
    server.answers["flush_cache"] = (400, "Timed out waiting for idle state.")
    with pytest.raises(EngineError, match=r"timeout=0\.5: status 400: Timed out"):
        ask(server, lambda client: client.drain(0.5))
    assert [path for _, path, _ in server.asked[1:]] == [
        *("flush_cache", "abort_request", "flush_cache")
    ]


def test_an_ipv6_host_is_bracketed_in_urls() -> None:
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("[fe80::1]", 80) == "http://[fe80::1]:80"
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert http_url("node-1", 80) == "http://node-1:80"


def test_engine_i_joins_a_group_behind_all_gpus_of_the_engines_before_it(server: Server) -> None:
    server.answers["init_weights_update_group"] = (200, {"success": True, "message": ""})
    engines = HttpEngineSet((server.url, server.url), gpus_per_engine=2, timeout_s=10)
    group = WeightGroup(
        name="g",
        master_address="127.0.0.1",
        master_port=1234,
        world_size=5,
        backend="gloo",
        timeout_s=9.0,
    )
    engines.init_weight_group(group).result(10)
    engines.close()
    bodies = [body for _, _, body in server.asked]
    assert sorted(body.pop("rank_offset") for body in bodies) == [1, 3]
    assert bodies[0] == {
        "master_address": "127.0.0.1",
        "master_port": 1234,
        "world_size": 5,
        "group_name": "g",
        "backend": "gloo",
        "timeout_s": 9.0,
    }


def test_one_failing_engine_fails_the_call_to_all_and_is_named(server: Server) -> None:
    server.answers["pause_generation"] = (200, {"success": True})
    other = Server()
    other.answers["pause_generation"] = (500, "out of order")
    engines = HttpEngineSet((server.url, other.url), timeout_s=10)
    with pytest.raises(EngineError, match=f"{other.url}/pause_generation: status 500: out of"):
        engines.pause("abort")
    assert server.body("pause_generation") == {"mode": "abort"}
    engines.close()
    other.stop()


def test_an_engine_set_travels_by_pickle_and_works_after_close(server: Server) -> None:
    server.answers["continue_generation"] = (200, {"success": True})
    addresses = EngineAddresses(urls=(server.url,), gpus_per_engine=4, generation=2)
    engines = HttpEngineSet.of(addresses, timeout_s=10)
    engines.resume()
    copy = pickle.loads(pickle.dumps(engines))
    assert (copy.urls, copy.gpus_per_engine, copy.generation) == ((server.url,), 4, 2)
    copy.resume()
    copy.close()
    copy.resume()
    copy.close()
    engines.close()
    assert len(server.asked) == 3


def test_dropping_an_engine_set_ends_its_thread(server: Server) -> None:
    server.answers["continue_generation"] = (200, {"success": True})
    # By identity: threads of other tests may still end.
    before = set(threading.enumerate())
    engines = HttpEngineSet((server.url,), timeout_s=10)
    engines.resume()
    (thread,) = set(threading.enumerate()) - before
    del engines
    thread.join(30)
    assert not thread.is_alive()
