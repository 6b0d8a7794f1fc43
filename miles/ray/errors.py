"""Failures of actors, told so that a user can act: which actor, which rollout, and the cause."""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, UnserializableException

DEATH_NOTICE_S = 3.0
"""The other ranks of a collective notice a process's death before Ray reports it."""

_NEVER_RAN = "The actor never ran"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class JobError(RuntimeError):
    """A part of the job failed. The message is what the terminal shows."""


def describe(error: BaseException) -> str:
    """The cause of a Ray error in one or a few lines, without the colours that Ray puts in."""
    return _COLOR.sub("", _cause(error))


def _cause(error: BaseException) -> str:
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if len(lines) > 1 and lines[-1].startswith(_NEVER_RAN):
            # Ray adds it also where the process was killed while it imported the actor's module.
            del lines[-1]
        return f"the process died: {lines[-1]}"
    if isinstance(error, UnserializableException):
        return _last_error(str(error))
    return f"{type(error).__name__}: {error}"


def _last_error(trace: str) -> str:
    """The error at the end of a formatted traceback, in one line: all that is left of one whose
    class does not unpickle."""
    lines = trace.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] + 1 :] if frames else lines
    # Below the frame may stand its source and marks, both of them indented.
    message = list(itertools.dropwhile(lambda line: line.startswith(" "), rest))
    return " ".join(line.strip() for line in message if line.strip()) or lines[-1].strip()


async def call(name: str, reference: Awaitable[Any], *, during: str) -> Any:
    """Await one actor call; a failure becomes a ``JobError`` that names the actor."""
    try:
        return await reference
    except RayError as error:
        raise JobError(f"{name} failed during {during}: {describe(error)}") from error


async def call_all(calls: Mapping[str, Awaitable[Any]], *, during: str) -> list[Any]:
    """Await calls to several actors; a failure is raised without waiting for the rest.

    Ranks that wait in a collective for a failed one would otherwise hold the job until the
    collective's time-out. Of several failures within ``DEATH_NOTICE_S`` the one raised is that of a
    process that died, else the first.
    """
    tasks = [asyncio.ensure_future(call(name, ref, during=during)) for name, ref in calls.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((e for e in map(_error_of, tasks) if e is not None), None)
        if first is None:
            return [task.result() for task in tasks]
        if not is_death(first):
            await asyncio.wait(tasks, timeout=DEATH_NOTICE_S)
        errors = [e for e in map(_error_of, tasks) if e is not None]
        raise next(filter(is_death, errors), first)
    finally:
        await _cancel(tasks)


async def gather(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order; on the first failure cancel the rest, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _error_of(task: "asyncio.Future[Any]") -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def is_death(error: BaseException) -> bool:
    """Whether a ``JobError`` says that an actor's process ended."""
    return isinstance(error.__cause__, RayActorError)


def kill(actor: Any) -> None:
    """End an actor's process now."""
    ray.kill(actor, no_restart=True)
