"""Continuous batching: schedule (admit waiting prompts), run (one step), postprocess (finish rows).

One thread owns the model. Whatever else touches it or the queues is posted to that thread and runs
between two steps, in the order it was posted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.backends.embedded.admission import Admission
from miles.backends.embedded.protocol import Failed, Refused
from miles.backends.embedded.requests import Request, Sequence
from miles.backends.embedded.rows import Rows
from miles.backends.embedded.runner import PromptInput, Runner
from miles.backends.embedded.sampling import sample
from miles.backends.embedded.text import find_stop_strings
from miles.backends.embedded.waiting import Limits, Waiting, plan_slots
from miles.contracts.engine import PauseMode
from miles.core import device, logging
from miles.core.stop_strings import tail_length

log = logging.get(__name__)


class Scheduler:
    """``call`` and ``post`` may be used from any thread; everything else runs on its own."""

    def __init__(
        self, runner: Runner, tokenizer: Any, limits: Limits, admission_timeout_s: float
    ) -> None:
        """``tokenizer`` is used from the scheduler's thread only."""
        self.runner = runner
        self.limits = limits
        self.rows = Rows(limits.max_rows)
        self.waiting = Waiting(limits)
        self.admission = Admission(admission_timeout_s)
        self.paused = False
        self.released = False
        """Memory is given away: nothing runs and nothing is accepted."""
        self.weight_version = 0
        self._tokenizer = tokenizer
        self._requests: dict[str, Request] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread between two steps; returns after ``timeout_s`` even if it does not.

        Requests in flight get no answer: their connections drop, and clients try elsewhere."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def post(self, action: Callable[[], None]) -> None:
        """Run an action that does not raise between two steps. Raises ``Failed`` after ``stop``."""
        with self._wake:
            if self._stopping:
                raise Failed("the engine is shutting down")
            self._posted.append(action)
            self._wake.notify()

    def call[T](self, function: Callable[[], T]) -> "Future[T]":
        """Run a function between two steps; the future gets its result or exception."""
        future: Future[T] = Future()

        def action() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # the caller's, on its own thread
                future.set_exception(error)

        self.post(action)
        return future

    # Operations between steps

    def accept(self, request: Request) -> None:
        """Queue a request, or refuse it."""
        try:
            self._check(request)
            self._requests[request.rid] = request
            for admitted in self.admission.enter(request, time.monotonic()):
                self.waiting.push(admitted)
        except Refused as refused:
            if self._requests.get(request.rid) is request:
                del self._requests[request.rid]
            request.deliver(request, refused)

    def abort(self, rid: str | None = None) -> None:
        """Finish one request (or all) with what it has; an unknown id is ignored."""
        if rid is None:
            self._abort(set(self._requests.values()))
        elif rid in self._requests:
            self._abort({self._requests[rid]})

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. Idempotent; see ``PauseMode`` for what becomes of running sequences."""
        self.paused = True
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            self.retract()

    def resume(self) -> None:
        self.paused = False

    def retract(self) -> None:
        """Forget the keys and values of all running sequences; they are prefilled anew, with what
        they have produced, before anything that waits."""
        running = [self.rows.save(row) for row in range(len(self.rows))]
        self.rows.remove(np.arange(len(self.rows)))
        self.waiting.push_front(running)

    def drop_cache(self) -> None:
        """Free the slots. Raises ``Refused`` while sequences run, or are paused in place."""
        if len(self.rows):
            raise Refused(f"{len(self.rows)} sequences are in flight; pause by retract or abort")
        self.runner.kv.drop()

    # The loop

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._stopping = True

    def _turn(self) -> bool:
        with self._wake:
            while not (self._posted or self._stopping or self._can_step() or self._expired()):
                self._wake.wait(self._patience())
            posted, self._posted = self._posted, deque()
        for action in posted:
            action()
        if self._stopping:
            return False
        for request, refused in self.admission.expire(time.monotonic()):
            self._end(request, refused)
        if self._can_step():
            self._step()
        return True

    def _can_step(self) -> bool:
        return not (self.paused or self.released) and bool(len(self.rows) or self.waiting)

    def _patience(self) -> float | None:
        deadline = self.admission.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _expired(self) -> bool:
        deadline = self.admission.deadline
        return deadline is not None and deadline <= time.monotonic()

    # Schedule

    def _check(self, request: Request) -> None:
        if request.rid in self._requests:
            raise Refused(f"a request with rid {request.rid!r} is running")
        if self.released:
            raise Refused("the engine's memory is released; resume it first")
        if request.max_length > self.limits.max_total_tokens:
            raise Refused(
                f"{len(request.input_ids)} prompt and {request.params.max_new_tokens} new tokens "
                f"do not fit into the cache ({self.limits.max_total_tokens} tokens)"
            )

    def _admit(self) -> list[PromptInput]:
        """Move what fits from the queue into rows, and see to their slots."""
        num_running, longest = len(self.rows), self.rows.longest_cached
        prompts = self.waiting.admit(self.rows)
        slots, capacity = plan_slots(
            (self.runner.kv.num_slots, self.runner.kv.capacity),
            self.rows,
            max(longest + 1, self.rows.longest_cached),
            self.limits,
        )
        self.runner.reserve(slots, capacity, num_running, longest)
        return prompts

    # Run

    def _step(self) -> None:
        num_decode = len(self.rows)
        try:
            prompts = self._admit()
            logits = self.runner.step(
                self.rows.last_tokens[:num_decode], self.rows.cached[:num_decode], prompts
            )
            if any(prompt.num_slots > 1 for prompt in prompts):
                copies = [1] * num_decode + [prompt.num_slots for prompt in prompts]
                logits = self.runner.repeat(logits, copies)
            tokens, log_probs = sample(logits, self.rows.sampling())
            drawn = tokens.cpu().numpy(), log_probs.cpu().numpy()
        except Exception as error:  # whatever the model raised must reach the requests it hit
            if device.is_out_of_memory(error):
                self._give_up()
            else:
                self._fail_running(error)
            return
        self.rows.count_cached(num_decode)
        self.rows.append(*drawn, self.weight_version)
        self._postprocess(np.isfinite(drawn[1]))

    def _give_up(self) -> None:
        """End the process rather than answer: then the same requests are asked elsewhere, and an
        engine with all its memory takes this one's place."""
        log.exception("out of memory: this engine ends, and its requests go to another one")
        with self._wake:
            self._stopping = True

    def _fail_running(self, error: Exception) -> None:
        log.exception("a step failed; its requests fail with it")
        failed = {sequence.request for sequence in self.rows.sequences}
        self.rows.remove(np.arange(len(self.rows)))
        self.runner.kv.drop()
        self._fail(failed, f"the step failed: {type(error).__name__}: {error}")

    # Postprocess

    def _postprocess(self, finite: NDArray[np.bool_]) -> None:
        stopped, full = self.rows.stopped(), self.rows.full()
        matched = self._match_stop_strings()
        finished = stopped | full
        finished[list(matched)] = True
        failed = self._fail_not_finite(finite)
        finished[failed] = False
        for row in np.flatnonzero(finished).tolist():
            sequence = self.rows.save(row)
            if stopped[row]:
                self._finish(sequence, {"type": "stop", "matched": sequence.output_ids[-1]})
            elif row in matched:
                self._finish(sequence, {"type": "stop", "matched": matched[row]})
            else:
                self._finish(sequence, {"type": "length", "length": len(sequence.output_ids)})
        finished[failed] = True
        self._take_out(np.flatnonzero(finished))

    def _match_stop_strings(self) -> dict[int, str]:
        rows = self.rows.with_stop_strings().tolist()
        if not rows:
            return {}
        stops = [self.rows.sequences[row].request.params.stop_strings for row in rows]
        tails = [self.rows.tail(row, tail_length(s)) for row, s in zip(rows, stops, strict=True)]
        found = find_stop_strings(self._tokenizer, tails, stops)
        return {row: stop for row, stop in zip(rows, found, strict=True) if stop is not None}

    def _fail_not_finite(self, finite: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Fail the requests of rows whose logits were not finite; return all their rows."""
        rows = np.flatnonzero(~finite)
        if not len(rows):
            return rows
        self.runner.clear(rows)
        failed = {self.rows.sequences[row].request for row in rows.tolist()}
        return self._fail(failed, "the model's logits are not finite (were all weights loaded?)")

    def _take_out(self, gone: NDArray[np.int64]) -> None:
        if not len(gone):
            return
        source, target = self.rows.remove(gone)
        if len(source):
            self.runner.move(source, target, self.rows.longest_cached)

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._end(request, None)

    def _end(self, request: Request, error: Refused | Failed | None) -> None:
        if self._requests.pop(request.rid, None) is not None:
            request.deliver(request, error)

    def _abort(self, requests: set[Request]) -> None:
        self.admission.remove(requests)
        rows = self._withdraw(requests)
        for row in rows.tolist():
            self.rows.save(row)
        self._take_out(rows)
        for request in sorted(requests, key=lambda r: r.rid):
            for sequence in request.sequences:
                if sequence.finish is None:
                    if not sequence.output_ids:
                        sequence.weight_version = self.weight_version
                    self._finish(sequence, {"type": "abort", "message": "aborted"})

    def _fail(self, requests: set[Request], message: str) -> NDArray[np.int64]:
        for request in requests:
            self._end(request, Failed(message))
        return self._withdraw(requests)

    def _withdraw(self, requests: set[Request]) -> NDArray[np.int64]:
        """Take requests out of the queue; return the rows that their sequences hold."""
        self.waiting.remove(requests)
        return np.array(
            [row for row, s in enumerate(self.rows.sequences) if s.request in requests], np.int64
        )
