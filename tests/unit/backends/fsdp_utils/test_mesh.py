from datetime import timedelta

import pytest

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import time_outs_of_groups


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_group_of_the_mesh_waits_as_long_as_the_flag_says(
    two_ranks: Ranks, replicas: int
) -> None:
    for found in two_ranks.run_well(time_outs_of_groups, replicas, 7):
        assert found == [timedelta(minutes=7)] * 2 * replicas
