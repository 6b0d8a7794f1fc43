"""What can be told without a device; what travels is tested in tests/gpu/test_sglang_line.py."""

import pytest

from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.device_ipc import DeviceIpcTransport

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


def test_ranks_and_processes_of_engines_share_devices_in_pairs() -> None:
    transport = DeviceIpcTransport(timeout_s=1)
    transport.connect(HttpEngineSet(URLS[:1], timeout_s=1))
    for engines in (
        HttpEngineSet(URLS, timeout_s=1),
        HttpEngineSet(URLS[:1], gpus_per_engine=2, timeout_s=1),
    ):
        with pytest.raises(ValueError, match="1 trainer ranks and engines on 2 devices"):
            transport.connect(engines)


def test_a_newcomer_shares_a_device_by_its_position_among_all_engines() -> None:
    """Those of one rank are the engine at position 0."""
    transport = DeviceIpcTransport(timeout_s=1)
    transport.connect(HttpEngineSet(URLS[1:], newcomers=(0,), timeout_s=1))
    with pytest.raises(ValueError, match="engines on 2 devices"):
        transport.connect(HttpEngineSet(URLS[1:], newcomers=(1,), timeout_s=1))


def test_a_transport_that_has_sent_nothing_can_be_closed() -> None:
    transport = DeviceIpcTransport(timeout_s=1)
    transport.finish()
    transport.close()
