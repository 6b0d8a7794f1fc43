"""Jobs over two machines: two raylets of one host with addresses of their own.

Their GPUs are Ray's word only: slots that cannot all be on one machine.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.conftest import metrics_of

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.full

OTHER_MACHINE = "127.0.0.2"
"""Orders before the address of the driver's."""


@pytest.fixture(scope="module")
def two_machines() -> Iterator[dict[str, str]]:
    """The driver's machine has one GPU, the other one three: environment of a job."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=3, num_gpus=3, node_ip_address=OTHER_MACHINE)
        cluster.wait_for_nodes(timeout=60)
        yield {"RAY_ADDRESS": str(cluster.address)}
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def run_on_both(
    two_machines: dict[str, str], environment: dict[str, str], run_train: Runner
) -> Iterator[Runner]:
    before = dict(environment)
    environment.update(two_machines)
    yield run_train
    environment.clear()
    environment.update(before)


def test_trainer_and_engines_of_a_job_are_on_two_machines(
    run_on_both: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    flags = {
        **base_flags,
        "rollout-num-gpus": 2,
        "num-rollout": 2,
        "run-dir": tmp_path / "run",
    }
    result = run_on_both(flags)
    assert result.returncode == 0, result.stderr
    (served,) = re.findall(r"engines serve at (.*)", result.stderr)
    hosts = re.findall(r"http://([\d.]+):\d+", served)
    # The driver's engine too is where trainers on the other machine reach it.
    assert hosts[0] == OTHER_MACHINE
    assert not hosts[1].startswith("127.")
    assert len(hosts) == 2
    rows = metrics_of(tmp_path / "run")
    assert [row["rollout/weight_version"] for row in rows] == [2, 3]


def test_a_layout_that_the_machines_cannot_hold_is_refused_before_anything_starts(
    run_on_both: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    flags = {
        **base_flags,
        "actor-num-gpus-per-node": 4,
        "colocate": True,
        "run-dir": tmp_path / "run",
    }
    del flags["rollout-num-gpus"]
    result = run_on_both(flags)
    assert result.returncode == 1
    assert f"{OTHER_MACHINE} has slots 0-2" in result.stderr
    assert "trainer ranks 0-3 (slots 0-3) are one node's" in result.stderr


def test_colocated_engines_that_share_host_memory_stay_on_one_machine(
    run_on_both: Runner, base_flags: dict[str, Any], tmp_path: Path
) -> None:
    flags = {
        **base_flags,
        "actor-num-nodes": 4,
        "actor-num-gpus-per-node": 1,
        "colocate": True,
        "run-dir": tmp_path / "run",
    }
    del flags["rollout-num-gpus"]
    result = run_on_both(flags)
    assert result.returncode == 1
    assert "take weights through host memory" in result.stderr
    assert not (tmp_path / "run/logs").exists()
