"""The session's own choices; what travels is tested in tests/contract/test_weight_sync.py."""

from dataclasses import replace

import pytest

from miles.config.root import MilesConfig
from miles.weight_sync.broadcast import BroadcastTransport
from miles.weight_sync.colocated import ColocatedTransport
from miles.weight_sync.session import TRANSPORTS, make_weight_sync


def test_the_layout_picks_shared_memory_and_the_flag_everything_else() -> None:
    config = MilesConfig()
    assert isinstance(make_weight_sync(config).transport, BroadcastTransport)
    colocated = replace(config, cluster=replace(config.cluster, colocate=True))
    assert isinstance(make_weight_sync(colocated).transport, ColocatedTransport)


def test_an_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'carrier-pigeon'; there are: broadcast, colocated"):
        TRANSPORTS.load("carrier-pigeon")
