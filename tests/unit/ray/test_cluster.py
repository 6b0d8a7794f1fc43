"""Joining a Ray cluster."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from miles.ray.cluster import require_reachable
from miles.ray.errors import JobError

ROOT = Path(__file__).resolve().parents[3]


def test_an_address_where_nothing_listens_is_refused_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        require_reachable(address)
    with pytest.raises(JobError, match=f"RAY_ADDRESS={address}.*unset RAY_ADDRESS"):
        require_reachable(address)


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_addresses_that_name_no_port_are_left_to_ray(address: str) -> None:
    require_reachable(address)


NUM_SERVERS = """
import psutil

def num_servers():
    '''Children of this process that are the head of a cluster; others come and go.'''
    found = 0
    for process in psutil.Process().children():
        try:
            # Of a zombie it is empty, or an error.
            found += "gcs_server" in " ".join(process.cmdline()[:1])
        except psutil.NoSuchProcess:
            continue
    return found
"""

SECOND_ATTEMPT = """
import logging, os
import ray
from miles.ray import cluster

class Remedy(logging.Handler):
    '''The folder is too long for a socket's path, until the first attempt has failed.'''
    def emit(self, record):
        if "trying once more" in record.getMessage():
            os.environ["RAY_TMPDIR"] = os.environ["GOOD_TMPDIR"]

cluster.log.addHandler(Remedy())
cluster.start()
assert ray.is_initialized()
assert num_servers() == 1
cluster.stop()
"""


def test_ray_that_does_not_start_is_started_once_more(tmp_path: Path) -> None:
    """What the first attempt has started is gone by then."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray") as good:
        result = subprocess.run(
            [sys.executable, "-c", NUM_SERVERS + SECOND_ATTEMPT],
            env={
                **environment,
                "PYTHONPATH": str(ROOT),
                "RAY_TMPDIR": str(tmp_path / ("x" * 120)),
                "GOOD_TMPDIR": good,
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trying once more" in result.stdout + result.stderr


OWN_CLUSTER = """
from miles.ray import cluster

cluster.start()
assert num_servers() == 1
cluster.stop()
"""


@pytest.mark.parametrize("address", [None, ""])
def test_without_an_address_no_cluster_of_another_is_joined(address: str | None) -> None:
    """``ray start`` leaves the address of its cluster where Ray looks for one."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    if address is not None:
        environment["RAY_ADDRESS"] = address
    with socket.create_server(("127.0.0.1", 0)) as server:
        stale = f"127.0.0.1:{server.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        left = Path(folder, "ray", "ray_current_cluster")
        left.parent.mkdir()
        left.write_text(stale)
        result = subprocess.run(
            [sys.executable, "-c", NUM_SERVERS + OWN_CLUSTER],
            env={**environment, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert result.returncode == 0, result.stdout + result.stderr
