"""Every test of this folder needs an accelerator and skips without one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

MAX_RANKS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The hook sees the whole session's tests; only this folder's are marked."""
    folder = Path(__file__).parent
    absent = pytest.mark.skip(reason="no accelerator")
    for item in (item for item in items if folder in item.path.parents):
        item.add_marker(pytest.mark.gpu)
        if not torch.accelerator.is_available():
            item.add_marker(absent)


@dataclass(frozen=True)
class DeviceRanks:
    """One trainer rank on each of up to ``MAX_RANKS`` devices."""

    ranks: Ranks
    size: int

    def run(self, function: Any, *args: Any) -> Any:
        return self.ranks.run_well(function, *args)


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[DeviceRanks]:
    size = min(MAX_RANKS, torch.accelerator.device_count())
    ranks = Ranks(size)
    yield DeviceRanks(ranks, size)
    ranks.close()
