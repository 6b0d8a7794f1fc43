"""The grader processes of this process: started when first needed, killed when they hang."""

import asyncio
import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from miles.rollout.user_call import DaemonThreads

MAX_GRADERS = min(8, os.cpu_count() or 1)
PREPARE_TIMEOUT_S = 120.0
"""For importing the libraries and building a task family, which is not the answer's fault."""

Job = Mapping[str, Any]


class Grader:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        # -P: a file of the working directory must not take the place of a library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "miles.rollout.rewards.grader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._prepared = set[str]()

    def run(self, job: Job, timeout_s: float) -> dict[str, Any]:
        """Raises ``TimeoutError`` when there is no verdict in time, ``OSError`` when it died."""
        kind = _kind(job)
        if kind not in self._prepared:
            verdict = self._ask({**job, "prepare": True}, PREPARE_TIMEOUT_S)
            if "error" in verdict:
                return verdict
            self._prepared.add(kind)
        return self._ask({**job, "prepare": False}, timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, job: Job, timeout_s: float) -> dict[str, Any]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        pipe.write(json.dumps({**job, "timeout_s": timeout_s}).encode() + b"\n")
        pipe.flush()
        if not select.select([answers], [], [], timeout_s)[0]:
            raise TimeoutError(f"the grader gave no verdict in {timeout_s:g} s")
        line = answers.readline()
        if not line:
            raise ConnectionError("the grader process died on the answer")
        return json.loads(line)


def _kind(job: Job) -> str:
    """What the grader prepares for once."""
    recipe = job.get("recipe", {})
    family = recipe.get("family", job.get("family"))
    return json.dumps([job["kind"], family, recipe.get("kwargs")], sort_keys=True)


class GraderPool:
    """Up to ``max_graders`` processes, each busy with one answer at a time."""

    def __init__(self, max_graders: int) -> None:
        self._places: queue.LifoQueue[Grader | None] = queue.LifoQueue()
        for _ in range(max_graders):
            self._places.put(None)
        self._lock = threading.Lock()
        self._graders = set[Grader]()

    def run(self, job: Job, timeout_s: float) -> dict[str, Any]:
        grader = self._places.get()
        healthy = False
        try:
            if grader is None:
                grader = Grader()
                with self._lock:
                    self._graders.add(grader)
            verdict = grader.run(job, timeout_s)
            healthy = True
            return verdict
        finally:
            if grader is not None and not healthy:
                self._discard(grader)
            self._places.put(grader if healthy else None)

    def close(self) -> None:
        with self._lock:
            graders = tuple(self._graders)
        for grader in graders:
            self._discard(grader)

    def _discard(self, grader: Grader) -> None:
        with self._lock:
            self._graders.discard(grader)
        grader.close()


_pool = GraderPool(MAX_GRADERS)
_threads = DaemonThreads(MAX_GRADERS)
atexit.register(_pool.close)


async def grade(job: Job, timeout_s: float) -> float:
    """The score of a job (see ``grader.run_job``).

    Raises ``TimeoutError`` or ``OSError`` when the grader hung or died (the next job gets a new
    one), ``ValueError`` when there is no verdict.
    """
    verdict = await asyncio.wrap_future(_threads.submit(_pool.run, job, timeout_s))
    if "error" in verdict:
        raise ValueError(verdict["error"])
    return verdict["score"]
