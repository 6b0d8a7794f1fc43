"""Which of several failures the user is told."""

import asyncio
import time
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError

from miles.ray.errors import JobError, call_all, describe


async def after(seconds: float, outcome: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def task_error(text: str) -> RayTaskError:
    return RayTaskError("train", text, RuntimeError(text))


def test_results_come_in_the_order_of_the_calls() -> None:
    calls = {"a": after(0.05, 1), "b": after(0, 2)}
    assert asyncio.run(call_all(calls, during="training")) == [1, 2]


def test_a_process_that_died_is_named_before_the_peers_that_lost_it() -> None:
    calls = {
        "trainer 0": after(0, task_error("Connection closed by peer")),
        "trainer 1": after(0.2, RayActorError()),
    }
    with pytest.raises(JobError, match="trainer 1 failed during training: the process died"):
        asyncio.run(call_all(calls, during="training"))


def test_a_rank_that_waits_for_a_failed_one_does_not_hold_the_job() -> None:
    calls = {"trainer 0": after(300, None), "trainer 1": after(0, task_error("bad loss"))}
    start = time.monotonic()
    with pytest.raises(JobError, match="trainer 1 failed during training: RuntimeError: bad loss"):
        asyncio.run(call_all(calls, during="training"))
    assert time.monotonic() - start < 30


def test_what_an_error_says_has_no_colours() -> None:
    assert describe(task_error("\x1b[36mray::f()\x1b[39m failed")) == (
        "RuntimeError: ray::f() failed"
    )


class Refused(Exception):
    """Does not unpickle: what it is made of is not what it shows."""

    def __init__(self, field: str, cause: Exception) -> None:
        super().__init__(f"Validation error for field '{field}':\n    TypeError: {cause}")


def test_an_error_whose_class_does_not_unpickle_is_told_in_one_line() -> None:
    trace = (
        "\x1b[36mray::Actor.init()\x1b[39m (pid=7, ip=192.0.2.2)\n"
        "           ^^^^^^^^^^^^^\n"
        '  File "model.py", line 11, in load\n'
        "    raise Refused(name, error)\n"
        "tests.Refused: Validation error for field 'size':\n"
        "    TypeError: expected int, got str (value: 'big')\n"
    )
    sent = RayTaskError("init", trace, Refused("size", TypeError("expected int, got str")))
    received = RayError.from_bytes(sent.to_bytes())
    assert describe(received) == (
        "tests.Refused: Validation error for field 'size': "
        "TypeError: expected int, got str (value: 'big')"
    )


def test_a_process_that_is_killed_while_it_imports_did_run() -> None:
    text = "The actor died.\n\tpid: 7\nWorker exit detail: SIGKILL\nThe actor never ran - it was"
    found = describe(RayActorError(error_msg=text))
    assert found == "the process died: Worker exit detail: SIGKILL"
