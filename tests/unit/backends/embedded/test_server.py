"""Why a server ends: by what came first."""

import signal

import uvicorn

from miles.backends.embedded.server import Server


def test_a_scheduler_that_a_signal_stopped_is_no_failure() -> None:
    server = Server(uvicorn.Config(app=None))  # pyright: ignore[reportArgumentType]
    server.handle_exit(signal.SIGTERM, None)
    server.end("the scheduler ended")
    assert server.should_exit
    assert server.failure is None


def test_a_signal_after_a_failure_does_not_hide_it() -> None:
    server = Server(uvicorn.Config(app=None))  # pyright: ignore[reportArgumentType]
    server.end("the scheduler ended")
    server.handle_exit(signal.SIGTERM, None)
    assert server.failure == "the scheduler ended"
