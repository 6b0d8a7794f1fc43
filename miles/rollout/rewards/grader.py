"""A grader process: JSON jobs on standard input, one a line, and a score for each on its output.

It is a process because symbolic mathematics can run for ever on what a model writes, and only a
process can be ended. Run as ``python -m miles.rollout.rewards.grader``.
"""

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any


def grade_math(answer: str, label: str) -> float:
    r"""1 when any reading of the answer equals the label, else 0.

    The label is read as mathematics, without the ``#### `` that GSM8K puts before it.
    """
    from math_verify import parse, verify

    gold = label.rsplit("####")[-1].strip()
    wrapped = gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}"
    # 0: no time-out of math-verify's own, which would take over the alarm that ends this process.
    wanted = parse(wrapped, parsing_timeout=0)
    if not wanted:
        raise ValueError(f"the label {label!r} is not mathematics that math-verify can read")
    given = parse(answer, parsing_timeout=0)
    return float(verify(wanted, given, timeout_seconds=0))


@functools.cache
def _dataset(family: str, kwargs_json: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, **json.loads(kwargs_json))


def _dataset_of(job: Mapping[str, Any]) -> Any:
    recipe = job.get("recipe", {"family": job.get("family"), "kwargs": {"size": 1, "seed": 0}})
    return _dataset(recipe["family"], json.dumps(recipe["kwargs"]))


def grade_gym(job: Mapping[str, Any]) -> float:
    """The family's score of the answer; 0 when its grader raises on it, but not on the right one.

    Raises what the grader raises when it cannot even score the entry's own answer: then the entry
    is at fault, and a 0 would blame the model for it.
    """
    from reasoning_gym.utils import extract_answer

    dataset = _dataset_of(job)
    entry = dataset[job["recipe"]["index"]] if "recipe" in job else job["entry"]
    tagged = extract_answer(job["answer"])
    answer = job["answer"].strip() if tagged is None else tagged
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # graders parse what a model wrote: any error of theirs is a wrong answer
        dataset.score_answer(entry["answer"], entry)
        return 0.0


def prepare(job: Mapping[str, Any]) -> None:
    """Import and build what jobs of this kind need, which is slow the first time."""
    if job["kind"] == "math":
        grade_math("1", "1")
    else:
        _dataset_of(job)


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """``{"score"}``, or ``{"error"}`` when there is no verdict."""
    try:
        if job["prepare"]:
            prepare(job)
            return {"score": 0.0}
        score = grade_math(job["answer"], job["label"]) if job["kind"] == "math" else grade_gym(job)
    except Exception as error:  # the verdict of a library on arbitrary text crosses a pipe
        return {"error": f"{type(error).__name__}: {error}"}
    return {"score": score}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    # Only scores may go to the pipe, whatever a library prints.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        # Should the parent be gone, this ends a job that runs for ever.
        signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + 5.0)
        verdict = run_job(job)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        print(json.dumps(verdict), file=output, flush=True)


if __name__ == "__main__":
    main()
