"""Process groups and rank helpers."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from miles.core import device

_hosted_stores: list[dist.TCPStore] = []


def host_rendezvous(host: str) -> int:
    """Serve the job's rendezvous store in this process and return its port.

    The kernel picks the port while binding it, so nothing can take it in between.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    _hosted_stores.append(store)
    return store.port


def init_process_group(timeout_minutes: float) -> None:
    """Join the job's process group from the environment and bind this process's device.

    With ``TORCHELASTIC_USE_AGENT_STORE=True`` in the environment every rank is a client of a
    store that is already served (``host_rendezvous``, torchrun); else rank 0 serves it.
    """
    device.bind(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        device.process_group_backend(), timeout=timedelta(minutes=timeout_minutes)
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


def raise_together(error: Exception | None, what: str) -> None:
    """Raise on every rank when any rank has an error, so that none waits in a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {r: m for r, m in enumerate(messages) if m is not None}
    if failed:
        raise RuntimeError(f"{what} failed on other ranks: {failed}")
