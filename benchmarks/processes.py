"""Each measurement in a process of its own: a whole job of one rank."""

import multiprocessing as mp
import os
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import train_step
from miles.core import distributed


def in_process(target: Callable[..., Any], *arguments: Any) -> Any:
    """What ``target`` returns in a process that is a whole job of one rank."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    port = distributed.host_rendezvous("127.0.0.1")
    process = context.Process(target=_child, args=(results, target, port, arguments), daemon=True)
    process.start()
    answer = _answer(process, results)
    process.join(60)
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


def resident_bytes(pid: int | None = None) -> int | None:
    """Of a process, by default this one, in host memory, without mapped files; ``None`` where the
    system tells only all of it together. Raises ``OSError`` when there is no such process."""
    status = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    parts = [fields[name] for name in ("RssAnon", "RssShmem") if name in fields]
    return sum(int(part.split()[0]) << 10 for part in parts) if parts else None


def _answer(process: Any, results: Any) -> Any:
    deadline = time.monotonic() + train_step.RESULT_TIMEOUT_S
    while time.monotonic() < deadline:
        lives = process.is_alive()
        with suppress(queue.Empty):
            return results.get(timeout=1)
        if not lives:
            raise SystemExit(f"a process of the benchmark ended, exit code {process.exitcode}")
    raise SystemExit(f"a process of the benchmark took over {train_step.RESULT_TIMEOUT_S:.0f} s")


def _child(results: Any, target: Callable[..., Any], port: int, arguments: Sequence[Any]) -> None:
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    try:
        results.put(target(*arguments))
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")
        raise
