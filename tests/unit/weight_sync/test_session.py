"""The session's own choices; what travels is tested in tests/contract/test_weight_sync.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles.config.root import MilesConfig
from miles.contracts.types import NamedTensor
from miles.weight_sync.broadcast import BroadcastTransport
from miles.weight_sync.checksums import TensorDigests
from miles.weight_sync.colocated import ColocatedTransport
from miles.weight_sync.session import TRANSPORTS, WeightSync, make_weight_sync


def test_the_layout_picks_shared_memory_and_the_flag_everything_else() -> None:
    config = MilesConfig()
    assert isinstance(make_weight_sync(config).transport, BroadcastTransport)
    colocated = replace(config, cluster=replace(config.cluster, colocate=True))
    assert isinstance(make_weight_sync(colocated).transport, ColocatedTransport)


def test_an_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'carrier-pigeon'; there are: broadcast, colocated"):
        TRANSPORTS.load("carrier-pigeon")


def test_a_digest_that_fails_leaves_no_weight_ungathered() -> None:
    """Other ranks gather every weight with this one: stopping early would leave them waiting."""
    gathered: list[int] = []

    def weights() -> Iterator[NamedTensor]:
        for number in range(3):
            gathered.append(number)
            yield NamedTensor(str(number), torch.ones(2, device="meta"))

    sync = WeightSync(ColocatedTransport(timeout_s=1), max_bytes=100, check=True)
    sync._digests = TensorDigests()
    no_engine: Any = None
    with pytest.raises(NotImplementedError):
        sync._stream(no_engine, weights(), 1)
    assert gathered == [0, 1, 2]
