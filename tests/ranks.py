"""Trainer ranks for tests: processes that are started once and run many jobs.

Over gloo, or, where there are accelerators, each on a device of its own.
"""

import gc
import multiprocessing as mp
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

ANSWER_TIMEOUT_S = 280.0


class Ranks:
    """``run`` calls a module-level function on the ranks, each time in a new rendezvous.

    The function starts from the environment that a trainer process gets (``RANK`` and so on) and
    leaves the process group again.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, num_ranks: int | None = None) -> Any:
        """What the function returned or raised, rank by rank."""
        from torch.distributed import TCPStore

        wanted = self._num_ranks if num_ranks is None else num_ranks
        self._start(wanted)
        pipes = self._pipes[:wanted]
        store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=ANSWER_TIMEOUT_S),
        )
        for rank, pipe in enumerate(pipes):
            pipe.send((function, args, rank, len(pipes), store.port))
        answers: list[Any] = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(ANSWER_TIMEOUT_S), f"rank {rank} hangs in {function.__name__}"
            answers.append(pipe.recv())
        return answers

    def run_well(
        self, function: Callable[..., Any], *args: Any, num_ranks: int | None = None
    ) -> Any:
        """The same; an error on any rank fails the test."""
        answers = self.run(function, *args, num_ranks=num_ranks)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _start(self, wanted: int) -> None:
        """Have so many processes: each takes seconds to start, and many jobs need few."""
        assert wanted <= self._num_ranks, f"{self._num_ranks} ranks"
        context = mp.get_context("spawn")
        while len(self._processes) < wanted:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()
    while True:
        try:
            function, args, rank, world_size, port = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        pipe.send(_outcome(function, args))


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import traceback

    from miles.core import distributed

    try:
        return function(*args)
    except Exception as error:  # the test judges it
        error.add_note(traceback.format_exc())
        return error
    finally:
        distributed.destroy_process_group()
        # Groups that circles of objects hold keep their threads, which wake up all the time.
        gc.collect()
