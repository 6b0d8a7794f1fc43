"""The port that a server's owner holds until the server listens there."""

import socket

import pytest

from miles.core.ports import hold_port, host_and_port


def test_a_held_port_is_given_to_nobody_but_a_server_that_reuses_addresses() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=5) as client,
        ):
            assert client.getpeername()[1] == port


def test_a_held_port_is_not_one_of_those_that_the_system_hands_out() -> None:
    held = [hold_port() for _ in range(50)]
    taken = {each.getsockname()[1] for each in held}
    given = [socket.create_server(("127.0.0.1", 0)) for _ in range(50)]
    assert len(taken) == 50
    assert taken.isdisjoint(each.getsockname()[1] for each in given)
    for each in [*held, *given]:
        each.close()


def test_an_address_with_colons_stands_in_brackets() -> None:
    assert host_and_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert host_and_port("fd00::1", 80) == host_and_port("[fd00::1]", 80) == "[fd00::1]:80"
