"""The HTTP routes of the embedded engine: bodies in, answers out, errors as status codes."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from miles.backends.embedded import protocol
from miles.backends.embedded.engine import HEALTH_TIMEOUT_S, Engine, probe_body
from miles.backends.embedded.protocol import Failed, GenerateBody, Refused
from miles.backends.embedded.requests import Request
from miles.backends.embedded.text import response_texts
from miles.core import logging

log = logging.get(__name__)

MAX_BODY_BYTES = 64 * 1024**2

Handler = Callable[[HttpRequest], Awaitable[Response]]


class NotReady(Exception):
    """The model is still loading."""


class BodyTooLarge(Exception):
    """More than ``MAX_BODY_BYTES``."""


@dataclass
class Holder:
    """Holds the engine once it is loaded."""

    engine: Engine | None = None

    def get(self) -> Engine:
        if self.engine is None:
            raise NotReady
        return self.engine


COMMANDS: dict[str, tuple[type[Any], Callable[[Engine, Any], Mapping[str, Any] | None]]] = {
    "/pause_generation": (protocol.PauseBody, Engine.pause),
    "/continue_generation": (protocol.Empty, Engine.resume),
    "/abort_request": (protocol.AbortBody, Engine.abort),
    "/flush_cache": (protocol.Empty, Engine.flush_cache),
    "/release_memory_occupation": (protocol.MemoryBody, Engine.release_memory),
    "/resume_memory_occupation": (protocol.MemoryBody, Engine.resume_memory),
    "/begin_weight_update": (protocol.Empty, Engine.begin_update),
    "/end_weight_update": (protocol.Empty, Engine.end_update),
    "/update_weights_from_tensor": (protocol.TensorUpdateBody, Engine.update_from_tensor),
    "/update_weights_from_distributed": (protocol.GroupUpdateBody, Engine.update_from_group),
    "/update_weights_from_disk": (protocol.DiskUpdateBody, Engine.update_from_disk),
    "/init_weights_update_group": (protocol.GroupBody, Engine.init_group),
    "/update_weight_version": (protocol.VersionBody, Engine.set_version),
    "/weights_checker": (protocol.CheckBody, Engine.check_weights),
}
"""Path -> body and the engine's method, which runs between two steps."""

INFORMATION: dict[str, Callable[[Engine], Mapping[str, Any]]] = {
    "/server_info": Engine.server_info,
    "/get_server_info": Engine.server_info,
    "/model_info": Engine.model_info,
    "/get_model_info": Engine.model_info,
    "/v1/loads": Engine.loads,
}


def make_app(holder: Holder) -> FastAPI:
    """All routes; those that need the engine answer 503 until ``holder`` has it."""
    app = FastAPI(openapi_url=None)
    for path, handler in {
        "/generate": _generate,
        "/destroy_weights_update_group": _destroy_group,
    }.items():
        app.add_api_route(path, _bound(holder, handler), methods=["POST"])
    for path, (kind, method) in COMMANDS.items():
        app.add_api_route(path, _command(holder, kind, method), methods=["POST"])
    for path, method in INFORMATION.items():
        app.add_api_route(path, _information(holder, method), methods=["GET"])
    flush = _command(holder, protocol.Empty, Engine.flush_cache)
    app.add_api_route("/flush_cache", flush, methods=["GET"])
    for path, handler in {
        "/health": _health,
        "/health_generate": _health_generate,
        "/v1/models": _models,
    }.items():
        app.add_api_route(path, _bound(holder, handler), methods=["GET"])
    for error, status in ((Refused, 400), (NotReady, 503), (BodyTooLarge, 413), (Failed, 500)):
        app.add_exception_handler(error, _error_handler(status))
    app.add_exception_handler(Exception, _error_handler(500))
    return app


async def read_body(request: HttpRequest) -> bytes:
    """The body, at most ``MAX_BODY_BYTES`` of it."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"a body has at most {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _answer(content: Any, status: int = 200) -> Response:
    return Response(protocol.encode(content), status, media_type="application/json")


def _error_handler(status: int) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def handle(request: HttpRequest, error: Exception) -> Response:
        message = str(error) or type(error).__name__
        if status == 503:
            message = "the model is loading"
        return _answer({"success": False, "message": message}, status)

    return handle


def _bound(
    holder: Holder, handler: Callable[[Engine, HttpRequest], Awaitable[Response]]
) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        return await handler(holder.get(), request)

    return handle


def _information(holder: Holder, method: Callable[[Engine], Mapping[str, Any]]) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        return _answer(method(holder.get()))

    return handle


def _command(
    holder: Holder, kind: type[Any], method: Callable[[Engine, Any], Mapping[str, Any] | None]
) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        engine = holder.get()
        body = protocol.decode(await read_body(request), kind)
        try:
            result = await asyncio.wrap_future(engine.run(lambda: method(engine, body)))
        except ValueError as error:  # Refused, WeightLoadError
            raise Refused(str(error)) from error
        except RuntimeError as error:
            log.warning("%s failed: %s", request.url.path, error)
            raise Failed(f"{type(error).__name__}: {error}") from error
        return _answer({"success": True, "message": "Success.", **(result or {})})

    return handle


async def _destroy_group(engine: Engine, request: HttpRequest) -> Response:
    """Not on the scheduler's thread: it also frees that thread from a collective."""
    body = protocol.decode(await read_body(request), protocol.GroupNameBody)
    await asyncio.to_thread(engine.receiver.destroy_group, body.group_name)
    return _answer({"success": True, "message": "Success."})


async def _health(engine: Engine, request: HttpRequest) -> Response:
    return Response(status_code=200 if engine.scheduler.alive else 503)


async def _health_generate(engine: Engine, request: HttpRequest) -> Response:
    """Proves that the engine generates; while it is paused, only that it lives."""
    if engine.scheduler.paused or engine.scheduler.released:
        return await _health(engine, request)
    async with asyncio.timeout(HEALTH_TIMEOUT_S):
        await _run(engine, probe_body())
    return Response(status_code=200)


async def _models(engine: Engine, request: HttpRequest) -> Response:
    model = {
        "id": engine.settings.model_path,
        "object": "model",
        "owned_by": "miles",
        "max_model_len": engine.scheduler.limits.context_length,
    }
    return _answer({"object": "list", "data": [model]})


async def _generate(engine: Engine, request: HttpRequest) -> Response:
    body = protocol.decode(await read_body(request), GenerateBody)
    left = asyncio.create_task(_client_left(request))
    try:
        finished = await _run(engine, body, left)
    finally:
        left.cancel()
    samples = _samples(engine, finished, body.return_logprob)
    return _answer(samples[0] if body.sampling_params.n == 1 else samples)


async def _client_left(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _run(
    engine: Engine, body: GenerateBody, left: "asyncio.Task[None] | None" = None
) -> Request:
    """Generate; when the client has left (or this task is cancelled), abort."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Request] = loop.create_future()

    def resolve(request: Request, error: Exception | None) -> None:
        if finished.done():
            return
        if error is None:
            finished.set_result(request)
        else:
            finished.set_exception(error)

    def deliver(request: Request, error: Exception | None) -> None:
        loop.call_soon_threadsafe(resolve, request, error)

    rid = body.rid or uuid.uuid4().hex
    request = engine.prepare(body, rid, deliver)
    engine.scheduler.post(lambda: engine.scheduler.accept(request))
    try:
        ends = [finished] if left is None else [finished, left]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            raise Failed("the client went away")
        return finished.result()
    finally:
        if not finished.done() and engine.scheduler.alive:
            engine.scheduler.post(lambda: engine.scheduler.abort(rid))


def _samples(engine: Engine, request: Request, with_log_probs: bool) -> list[dict[str, Any]]:
    texts = response_texts(engine.tokenizer, request.sequences)
    samples: list[dict[str, Any]] = []
    for sequence, text in zip(request.sequences, texts, strict=True):
        meta: dict[str, Any] = {
            "id": request.rid if len(texts) == 1 else f"{request.rid}-{sequence.index}",
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(sequence.output_ids),
            # The first sample computes the prompt, the others take its keys and values.
            "cached_tokens": 0 if sequence.index == 0 else len(request.input_ids),
            "finish_reason": sequence.finish,
            "weight_version": str(sequence.weight_version),
        }
        if with_log_probs:
            pairs = zip(sequence.log_probs, sequence.output_ids, strict=True)
            meta["output_token_logprobs"] = [(value, token, None) for value, token in pairs]
        samples.append({"text": text, "output_ids": sequence.output_ids, "meta_info": meta})
    return samples
