"""Every test of this folder needs an accelerator and skips without one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import environment, ray_address, reverse_data, run_train
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.layouts import Layout
from tests.unit.backends.megatron_utils.made_models import make_models

__all__ = ["environment", "ray_address", "reverse_data", "run_train"]  # fixtures

MAX_RANKS = 2
MAX_LAYOUT_RANKS = 4


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


@dataclass(frozen=True)
class LayoutRanks:
    """As many trainer ranks as a layout of Megatron's needs, each on a device of its own."""

    ranks: Ranks
    size: int

    def run(self, layout: Layout, function: Any, *args: Any) -> Any:
        if layout.num_ranks > self.size:
            pytest.skip(f"{layout.num_ranks} accelerators are needed, {self.size} are there")
        return self.ranks.run_well(function, *args, num_ranks=layout.num_ranks)


@pytest.fixture(scope="session")
def layout_ranks() -> Iterator[LayoutRanks]:
    size = min(MAX_LAYOUT_RANKS, torch.accelerator.device_count())
    ranks = Ranks(size)
    yield LayoutRanks(ranks, size)
    ranks.close()


@pytest.fixture(scope="session")
def megatron_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("megatron-models"))
