"""Weights by broadcast: a process group of the source rank and every engine (gloo or nccl)."""

import logging
import socket
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from miles.contracts.engine import EngineError, EngineSet, GroupRef, WeightGroup
from miles.contracts.types import WeightBucket
from miles.core import device, distributed

logger = logging.getLogger(__name__)

# How long to wait for the engines' own words once the group has failed, and to leave it.
REASON_TIMEOUT_S = 5.0


class BroadcastTransport:
    """Rank 0 of the trainer is rank 0 of the group; engine i starts at ``1 + i * gpus_per_engine``.

    Engines are told to receive before anything is sent. While a broadcast runs their answers are
    watched: an engine that fails ends the update at once instead of leaving the trainer in a
    collective.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: EngineSet | None = None
        self._name = ""
        self._store: Any = None
        self._group: distributed.JoinedGroup | None = None
        self._loads: list[Future[None]] = []

    @property
    def is_source(self) -> bool:
        return distributed.rank() == 0

    def connect(self, engines: EngineSet) -> None:
        """Form a new group with these engines; one that existed is left."""
        self.close()
        address = address_for(engines.urls)
        # A name of its own for each connection: engines may still hold the last one.
        self._name = f"miles-{uuid.uuid4().hex[:12]}"
        self._engines = engines
        self._store = distributed.open_store(address, self._timeout_s)
        group = WeightGroup(
            name=self._name,
            master_address=address,
            master_port=self._store.port,
            world_size=1 + len(engines.urls) * engines.gpus_per_engine,
            backend=device.collective_backend(),
            timeout_s=self._timeout_s,
        )
        engines_join = engines.init_weight_group(group)
        we_join = _join_in_thread(group)
        pending: list[Future[Any]] = [engines_join, we_join]
        _, late = wait(pending, self._timeout_s, FIRST_EXCEPTION)
        self._raise_failed([engines_join], we_join.exception() if we_join.done() else None)
        if late:
            raise EngineError(f"weight group {self._name}: not formed in {self._timeout_s:g} s")
        self._group = we_join.result()

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        assert self._group is not None, "send before connect"
        # One bucket at a time: two loads in flight could be served in either order.
        self._wait_for_loads()
        self._engines = engines
        ref = GroupRef(group_name=self._name, entries=bucket.specs)
        self._loads = [
            engines.submit_load(ref, version, engine=i) for i in range(len(engines.urls))
        ]
        failure: Exception | None = None
        try:
            self._group.broadcast(
                [named.tensor for named in bucket.tensors],
                watch=lambda: self._raise_failed(self._loads),
                timeout_s=self._timeout_s,
            )
        except EngineError:
            raise
        except (RuntimeError, TimeoutError) as error:
            failure = error
        self._raise_failed(self._loads, failure)

    def finish(self) -> None:
        self._wait_for_loads()

    def close(self) -> None:
        engines, self._engines = self._engines, None
        group, self._group = self._group, None
        self._store, self._loads = None, []
        if group is not None:
            group.close()
        if engines is not None:
            # Our connections are closed, which frees the engines; that they forget the group too
            # is not worth waiting for one that hangs.
            leave = threading.Thread(target=_leave, args=(engines, self._name), daemon=True)
            leave.start()
            leave.join(REASON_TIMEOUT_S)

    def _wait_for_loads(self) -> None:
        loads, self._loads = self._loads, []
        for load in loads:
            load.result(self._timeout_s)

    def _raise_failed(
        self, calls: Sequence["Future[None]"], failure: BaseException | None = None
    ) -> None:
        """Raise what an engine answered; else our own end's ``failure``, when there is one.

        When the group breaks, the engine that broke it says why a moment later.
        """
        if failure is not None:
            wait(calls, REASON_TIMEOUT_S, FIRST_EXCEPTION)
        for call in calls:
            if call.done() and (error := call.exception()) is not None:
                raise error
        if failure is not None:
            raise EngineError(f"weight group {self._name}: {failure}") from failure


def _leave(engines: EngineSet, name: str) -> None:
    try:
        engines.destroy_weight_group(name)
    except EngineError as error:
        logger.warning("weight group %s: an engine could not leave: %s", name, error)


def _join_in_thread(group: WeightGroup) -> "Future[distributed.JoinedGroup]":
    """Join as rank 0 without blocking, so that an engine's refusal is seen meanwhile."""
    joined: Future[distributed.JoinedGroup] = Future()

    def join() -> None:
        try:
            joined.set_result(
                distributed.join_group(
                    group.name,
                    group.master_address,
                    group.master_port,
                    0,
                    group.world_size,
                    group.backend,
                    group.timeout_s,
                )
            )
        except RuntimeError as error:
            joined.set_exception(error)

    threading.Thread(target=join, name="join-group", daemon=True).start()
    return joined


def address_for(urls: Sequence[str]) -> str:
    """This machine's address as the engines see it: loopback only when all of them are local."""
    addresses = [_local_address(url) for url in urls]
    return next((a for a in addresses if not ip_address(a).is_loopback), addresses[0])


def _local_address(url: str) -> str:
    """The address from which this machine reaches the URL's host (nothing is sent)."""
    parts = urlsplit(url)
    family, kind, protocol, _, remote = socket.getaddrinfo(
        parts.hostname, parts.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]
