"""Joining a Ray cluster."""

import socket

import pytest

from miles.ray.cluster import require_reachable
from miles.ray.errors import JobError


def test_an_address_where_nothing_listens_is_refused_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        require_reachable(address)
    with pytest.raises(JobError, match=f"RAY_ADDRESS={address}.*unset RAY_ADDRESS"):
        require_reachable(address)


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_addresses_that_name_no_port_are_left_to_ray(address: str) -> None:
    require_reachable(address)
