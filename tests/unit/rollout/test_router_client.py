"""Registration with a router that only has the calls of releases up to 0.2.1."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from miles.contracts.engine import EngineError
from miles.rollout.engine_client import http_url
from miles.rollout.router_client import RouterClient, is_a_routers

ENGINE = "http://[::1]:30000"


class OldRouter(ThreadingHTTPServer):
    """What such a router answers, and what it was asked."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.calls: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: OldRouter

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        call = f"{method} {parts.path}"
        self.server.calls.append(call)
        url = parse_qs(parts.query).get("url", [""])[0]
        status, body = 200, ""
        if call == "GET /list_workers":
            body = json.dumps({"urls": self.server.urls})
        elif call == "POST /add_worker" and url != "http://refused":
            self.server.urls.append(url)
        elif call == "POST /remove_worker":
            self.server.urls.remove(url)
        else:
            status, body = (400, "no such worker") if url else (404, "")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def old_router() -> Iterator[OldRouter]:
    with OldRouter() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client_of(server: OldRouter) -> RouterClient:
    return RouterClient(http_url("127.0.0.1", server.server_address[1]), timeout_s=5)


def test_an_old_router_is_asked_once_and_then_spoken_to_in_its_own_way(
    old_router: OldRouter,
) -> None:
    async def run() -> list[tuple[str, ...]]:
        client = client_of(old_router)
        seen: list[tuple[str, ...]] = []
        for change in (client.add, client.add, client.remove, client.remove):
            await change(ENGINE)
            seen.append(await client.workers())
        return seen

    assert asyncio.run(run()) == [(ENGINE,), (ENGINE,), (), ()]
    assert old_router.calls.count("GET /workers") == 1
    assert old_router.calls.count("POST /add_worker") == 1
    assert old_router.calls.count("POST /remove_worker") == 1


def test_an_engine_that_the_router_refuses_is_said_with_its_reason(old_router: OldRouter) -> None:
    with pytest.raises(EngineError, match="POST /add_worker: status 400: no such worker"):
        asyncio.run(client_of(old_router).add("http://refused"))


@pytest.mark.parametrize(
    ("status", "answer", "routers"),
    [
        (503, b'{"error":{"type":"Service Unavailable","code":"no_available_workers"}}', True),
        (500, b'{"error":{"code":"call_upstream_request_error","message":"x"}}', True),
        (500, b'{"error":{"message":"out of memory"}}', False),
        (500, b"Internal Server Error", False),
        (400, b'{"error":{"code":"bad_request"}}', False),
    ],
)
def test_a_routers_own_fault_is_told_from_an_engines(
    status: int, answer: bytes, routers: bool
) -> None:
    assert is_a_routers(status, answer) is routers
