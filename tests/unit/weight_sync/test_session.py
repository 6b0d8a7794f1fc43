"""The session's own choices; what travels is tested in tests/contract/test_weight_sync.py."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError, EngineFeatures, EngineSet, PauseMode, WeightFormat
from miles.contracts.transport import WeightTransport
from miles.contracts.types import NamedTensor, WeightBucket
from miles.core import device
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.checksums import TensorDigests
from miles.weight_sync.colocated import ColocatedTransport
from miles.weight_sync.session import TRANSPORTS, WeightSync, transport_name
from tests.unit.rollout.test_engine_client import Server


def features(weight_format: WeightFormat) -> EngineFeatures:
    return EngineFeatures(weight_format=weight_format, dtype="float32", checksums="tensors")


def test_the_layout_picks_shared_memory_and_the_flag_everything_else() -> None:
    config = MilesConfig()
    assert transport_name(config, features("shm_bucket")) == "broadcast"
    colocated = replace(config, cluster=replace(config.cluster, colocate=True))
    assert transport_name(colocated, features("shm_bucket")) == "colocated"


@pytest.mark.parametrize(("by_device", "name"), [(True, "device_ipc"), (False, "colocated")])
def test_device_memory_is_shared_where_the_device_can_and_the_engine_takes_it(
    by_device: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "supports_device_ipc", lambda: by_device)
    config = MilesConfig()
    colocated = replace(config, cluster=replace(config.cluster, colocate=True))
    assert transport_name(colocated, features("flattened_bucket")) == name
    assert transport_name(colocated, features("shm_bucket")) == "colocated"


def test_an_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'carrier-pigeon'; there are: broadcast, colocated"):
        TRANSPORTS.load("carrier-pigeon")


class KeepsNothing(WeightTransport):
    """Takes buckets as one that has copied them; tells what is alive of them when it finishes."""

    is_source = True

    def __init__(self) -> None:
        self._sent: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[bool] = []

    def connect(self, engines: EngineSet) -> None:
        pass

    def send(self, bucket: WeightBucket, engines: EngineSet, version: int) -> None:
        self._sent += [weakref.ref(named.tensor) for named in bucket.tensors]

    def finish(self) -> None:
        self.alive = [tensor() is not None for tensor in self._sent]

    def close(self) -> None:
        pass


def test_no_bucket_is_held_while_engines_load_the_last_one() -> None:
    transport = KeepsNothing()
    sync = WeightSync(lambda _: transport, max_bytes=8)
    sync._transport = transport
    no_engine: Any = None
    sync._stream(no_engine, (NamedTensor(str(n), torch.ones(2)) for n in range(3)), 1)
    assert transport.alive == [False] * 3


def test_a_digest_that_fails_leaves_no_weight_ungathered() -> None:
    """Other ranks gather every weight with this one: stopping early would leave them waiting."""
    gathered: list[int] = []

    def weights() -> Iterator[NamedTensor]:
        for number in range(3):
            gathered.append(number)
            yield NamedTensor(str(number), torch.ones(2, device="meta"))

    transport = ColocatedTransport(timeout_s=1)
    sync = WeightSync(lambda _: transport, max_bytes=100, check=True)
    sync._transport, sync._digests = transport, TensorDigests()
    no_engine: Any = None
    with pytest.raises(NotImplementedError, match="meta tensor"):
        sync._stream(no_engine, weights(), 1)
    assert gathered == [0, 1, 2]


@pytest.fixture
def server() -> Iterator[Server]:
    """An engine that has requests in flight and takes weights."""
    ok = (200, {"success": True})
    server = Server()
    server.answers |= {
        "pause_generation": ok,
        "flush_cache": (400, "Flush cache failed.\n"),
        "begin_weight_update": (404, ""),
        "server_info": (200, {"dtype": "float32", "weight_formats": ["shm_bucket"]}),
        "model_info": (200, {"weight_version": "1"}),
        "continue_generation": ok,
    }
    yield server
    server.stop()


def push_nothing(server: Server, mode: PauseMode) -> list[str]:
    """What the engine is asked."""
    engines = HttpEngineSet((server.url,), timeout_s=10)
    sync = WeightSync(lambda _: ColocatedTransport(timeout_s=1), max_bytes=1, pause_mode=mode)
    try:
        assert sync.push(engines, ()) == sync.version == 1
    finally:
        engines.close()
    return [path for _, path, _ in server.asked]


def test_a_pause_in_place_alone_lets_requests_keep_what_a_flush_would_drop(server: Server) -> None:
    asked = push_nothing(server, "in_place")
    assert asked[:2] == ["pause_generation", "flush_cache"]
    assert asked[-1] == "continue_generation"
    with pytest.raises(EngineError, match="flush_cache: status 400"):
        push_nothing(server, "retract")


def test_newcomers_get_the_version_of_the_last_update(server: Server) -> None:
    server.answers["flush_cache"] = (200, "Cache flushed.\n")
    sync = WeightSync(lambda _: ColocatedTransport(timeout_s=1), max_bytes=1)
    sync.version = 1
    engines = HttpEngineSet((server.url,), newcomers=(3,), timeout_s=10)
    assert sync.push(engines, ()) == sync.version == 1
    engines.close()
