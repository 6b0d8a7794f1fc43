"""Process groups and rank helpers."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from miles.core import device

# The store and backend classes are documented, but torch's annotations do not export them.
c10d: Any = dist

DEFAULT_TIMEOUT_S = 300.0

_hosted_stores: list[Any] = []


def open_store(address: str, timeout_s: float) -> Any:
    """Serve a rendezvous store on a port of ``address`` that the kernel picks (``store.port``).

    Nothing can take the port between choosing and binding. The data live as long as the object.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Our own socket: the store would listen on every interface.
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return c10d.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def host_rendezvous(host: str) -> int:
    """Serve the job's rendezvous store in this process and return its port."""
    store = open_store(host, DEFAULT_TIMEOUT_S)
    _hosted_stores.append(store)
    return store.port


def init_process_group(timeout_minutes: float, host_backend: device.HostBackend = "gloo") -> None:
    """Join the job's process group from the environment and bind this process's device.

    With ``TORCHELASTIC_USE_AGENT_STORE=True`` in the environment every rank is a client of a
    store that is already served (``host_rendezvous``, torchrun); else rank 0 serves it.
    """
    device.bind(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        device.process_group_backend(host_backend), timeout=timedelta(minutes=timeout_minutes)
    )


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def broadcast_object(value: Any, src: int = 0) -> Any:
    """Return ``src``'s value on every rank. Only picklable values of our own processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src)
    return box[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank. Only picklable values of our own processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def error_of(step: Callable[[], object]) -> Exception | None:
    """Run the step; its error, whatever it is, becomes a value to ``raise_together``: other ranks
    wait for this one."""
    try:
        step()
    except Exception as error:
        return error
    return None


def raise_together(
    error: Exception | None, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank when any rank has an error, so that none waits in a collective.

    A thread beside the main one needs a ``group`` of its own (of all ranks).
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    messages = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = {r: m for r, m in enumerate(messages) if m is not None}
    if failed:
        raise FailedElsewhereError(f"{what} failed on other ranks: {failed}")


class FailedElsewhereError(RuntimeError):
    """Another rank has the error; this one only ends with it."""


class JoinedGroup:
    """Broadcasts from rank 0 between processes that may have different default groups, or none."""

    def __init__(self, backend: Any, store: Any) -> None:
        self._backend: Any = backend
        self._store: Any = store

    def broadcast(
        self, tensors: Sequence[torch.Tensor], *, watch: Callable[[], None], timeout_s: float
    ) -> None:
        """Send (rank 0) or fill (others) contiguous tensors in order; returns when all have moved.

        ``watch`` is called every few milliseconds and ends the wait by raising. Tensors travel as
        bytes, because gloo does not know every dtype. Raises ``TimeoutError``, or ``RuntimeError``
        when a member is gone; the group is then unusable and must be closed.
        """
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s)
        flat = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
        works = [self._backend.broadcast([one], options) for one in flat]
        deadline = time.monotonic() + timeout_s
        pause_s = 1e-4
        for work in works:
            while not work.is_completed():
                watch()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no broadcast within {timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5e-3)
            work.wait()

    def close(self) -> None:
        """Drop the connections, so that members still in a collective fail at once. Idempotent.

        gloo's destructor waits for a running operation (up to its time-out); it must not hold up
        the caller, so a daemon thread drops the last reference.
        """
        if self._backend is None:
            return
        self._backend.abort()
        box = [self._backend, self._store]
        self._backend = self._store = None
        threading.Thread(target=box.clear, name="close-group", daemon=True).start()


def join_group(  # noqa: PLR0913 (the protocol's own fields)
    name: str,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
) -> JoinedGroup:
    """Join the named group, whose store rank 0 opened with ``open_store``.

    Returns when all ``world_size`` members are there. Independent of the default process group.
    The chain of prefixes is the one of ``torch.distributed``'s own group construction, which SGLang
    uses on its side. Raises ``ValueError`` for an unknown backend and
    a ``RuntimeError`` when the others do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"group {name!r}: backend {backend!r} is not one of gloo, nccl")
    tcp = c10d.TCPStore(
        master_address, master_port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    family = "cuda" if backend == "nccl" else "cpu"
    store = c10d.PrefixStore(
        f"{family}/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, tcp))
    )
    group: Any
    if backend == "gloo":
        group = c10d.ProcessGroupGloo(store, rank, world_size, timeout)
    else:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = c10d.ProcessGroupNCCL(store, rank, world_size, options)
    group._set_sequence_number_for_group()
    return JoinedGroup(group, tcp)
