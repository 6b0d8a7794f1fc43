"""Calls a user's function with a time-out: an async one is awaited, another runs in a thread.

The threads are daemons of our own because a thread that hangs cannot be ended: the executors of
the standard library would wait for it when the process exits.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

MAX_THREADS = 64
"""Calls that run at once, abandoned ones not counted."""

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Threads that take calls from a queue; more are started while calls wait, up to a limit."""

    def __init__(self, max_threads: int) -> None:
        self._limit = max_threads
        self._num_threads = 0
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._abandoned = set[Future[Any]]()

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queue.put((future, function, args))
        if not self._idle.acquire(blocking=False):
            self._start()
        return future

    def abandon(self, future: "Future[Any]") -> None:
        """Give up a call: another thread may take the place of the one that runs it."""
        with self._lock:
            if future.cancel() or future.done():
                return
            self._abandoned.add(future)
            self._num_threads -= 1
        if not self._queue.empty():
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._num_threads >= self._limit:
                return
            self._num_threads += 1
        threading.Thread(target=self._run, name="user-call", daemon=True).start()

    def _run(self) -> None:
        while True:
            future, function, args = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # whatever user code raises goes to the caller
                    future.set_exception(error)
            with self._lock:
                if future in self._abandoned:
                    self._abandoned.remove(future)
                    return
            self._idle.release()


USER_THREADS = DaemonThreads(MAX_THREADS)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine (also an object with an async ``__call__``)."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


async def call_bounded(function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    """Return ``function(*args)``. Raises ``TimeoutError`` when it takes longer than ``timeout_s``.

    Waiting for a free thread does not count. A thread whose call was given up stays until the
    call returns; its result is dropped.
    """
    if is_async(function):
        async with asyncio.timeout(timeout_s):
            try:
                return await function(*args)
            except SystemExit as error:
                raise _exited(error) from error
    start_s = list[float]()

    def run() -> Any:
        start_s.append(time.monotonic())
        try:
            return function(*args)
        except SystemExit as error:
            raise _exited(error) from error

    future = USER_THREADS.submit(run)
    result = asyncio.wrap_future(future)
    try:
        remaining_s = timeout_s
        while remaining_s > 0:
            done, _ = await asyncio.wait([result], timeout=remaining_s)
            if done:
                return result.result()
            remaining_s = timeout_s - (time.monotonic() - start_s[0]) if start_s else timeout_s
        raise TimeoutError(f"no answer after {timeout_s:g} s")
    finally:
        if not future.done():
            USER_THREADS.abandon(future)


def _exited(error: SystemExit) -> RuntimeError:
    """In a task, an event loop would take the original for its own end."""
    return RuntimeError(f"it called sys.exit({error.code!r})")
