"""Starts engine servers for tests, and talks to any engine in the plainest way."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.backends.sglang_utils.arguments import router_arguments, server_arguments
from miles.config.root import MilesConfig

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class EngineProcess:
    """A server in a process of its own."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    ready_file: Path

    @property
    def url(self) -> str:
        return json.loads(self.ready_file.read_text())["url"]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def wait_ready(self) -> "EngineProcess":
        wait_for(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        return self

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()


def launch(model: Path, folder: Path, *options: str, parent: int | None = None) -> EngineProcess:
    """Start an embedded server; ``wait_ready`` waits until it has loaded."""
    arguments = ("--model-path", str(model), *options)
    return _start("miles.backends.embedded.server", arguments, folder, parent)


def launch_sglang(
    model: Path, folder: Path, *options: str, parent: int | None = None
) -> EngineProcess:
    """Start released SGLang as a job does, with more options of its own."""
    config = MilesConfig()
    config = replace(config, rollout=replace(config.rollout, hf_checkpoint=str(model)))
    arguments = (*server_arguments(config, index=0, num_engines=1), *options)
    return _start("miles.backends.sglang_utils.server", arguments, folder, parent)


def launch_router(folder: Path, *options: str, parent: int | None = None) -> EngineProcess:
    """Start SGLang's router as a job does; it has no engines yet."""
    arguments = (*router_arguments(MilesConfig()), *options)
    return _start("miles.backends.sglang_utils.router", arguments, folder, parent)


def _start(
    module: str, arguments: Sequence[str], folder: Path, parent: int | None
) -> EngineProcess:
    folder.mkdir(parents=True, exist_ok=True)
    fixed = ["--ready-file", str(folder / "ready"), "--parent-pid", str(parent or os.getpid())]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *fixed, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    return EngineProcess(process, folder, folder / "ready")


@contextmanager
def running_engine(model: Path, folder: Path, *options: str) -> Iterator[EngineProcess]:
    """An embedded server that is there for the block; SIGTERM must then end it cleanly."""
    with ending(launch(model, folder, *options)) as engine:
        yield engine


@contextmanager
def ending(engine: EngineProcess) -> Iterator[EngineProcess]:
    try:
        yield engine.wait_ready()
    finally:
        status = engine.stop()
    assert status == 0, engine.log


def get(url: str, path: str) -> Answer:
    return _call(urllib.request.Request(url + path))


def post(url: str, path: str, body: Any = None) -> Answer:
    """``body`` is sent as JSON; bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    headers = {"Content-Type": "application/json"}
    return _call(urllib.request.Request(url + path, data, headers))


def _call(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            return Answer(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read())


def wait_for(condition: Callable[[], Any], timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


def wait_idle(url: str) -> None:
    """A request whose answer is there may be in SGLang's scheduler for one more step: what needs an
    idle engine fails under it, and a load that is to flush the cache ends the scheduler."""
    wait_for(lambda: get(url, "/flush_cache").status == 200)


def running_requests(url: str) -> int:
    return sum(load["num_running_reqs"] for load in get(url, "/v1/loads").json["loads"])
