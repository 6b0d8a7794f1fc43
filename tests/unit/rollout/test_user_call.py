import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from miles.rollout.user_call import DaemonThreads, call_bounded


def test_plain_and_async_functions_give_their_result() -> None:
    async def double(x: int) -> int:
        return 2 * x

    class Doubler:
        async def __call__(self, x: int) -> int:
            return 2 * x

    for function in (lambda x: 2 * x, double, Doubler()):
        assert asyncio.run(call_bounded(function, 4, timeout_s=5.0)) == 8


def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        asyncio.run(call_bounded(fail, timeout_s=5.0))


def test_a_call_that_ends_the_program_is_an_error_of_that_call() -> None:
    async def leave() -> None:
        sys.exit(3)

    for function in (leave, lambda: sys.exit(3)):
        with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
            asyncio.run(call_bounded(function, timeout_s=5.0))


def test_a_call_that_hangs_is_given_up_and_others_go_on() -> None:
    release = threading.Event()

    async def run() -> list[Any]:
        hung = [call_bounded(release.wait, timeout_s=0.1) for _ in range(70)]
        return await asyncio.gather(*hung, return_exceptions=True)

    start = time.monotonic()
    # More of them than there are threads: the last ones start when the first are given up.
    assert all(isinstance(r, TimeoutError) for r in asyncio.run(run()))
    assert asyncio.run(call_bounded(lambda: 1, timeout_s=1.0)) == 1
    assert time.monotonic() - start < 5.0
    release.set()


def test_an_async_call_that_hangs_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(call_bounded(asyncio.sleep, 60, timeout_s=0.05))


def test_threads_are_used_again() -> None:
    threads = DaemonThreads(4)
    names = {threads.submit(threading.get_ident).result(5.0) for _ in range(50)}
    assert len(names) <= 4
