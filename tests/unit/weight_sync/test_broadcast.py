"""Where the rendezvous listens."""

import socket

from miles.weight_sync.broadcast import address_for


def test_engines_on_this_machine_alone_are_met_on_loopback() -> None:
    assert address_for(("http://127.0.0.1:1000", "http://localhost:1001")) == "127.0.0.1"


def test_one_engine_elsewhere_moves_the_rendezvous_to_an_address_it_can_reach() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # TEST-NET: routed, never answered
        expected = probe.getsockname()[0]
    assert address_for(("http://127.0.0.1:1000", "http://192.0.2.1:1001")) == expected
