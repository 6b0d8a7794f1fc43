"""Megatron in this process and on ranks of its own."""

from collections.abc import Iterator

import pytest

from miles.backends.megatron_utils import cpu_platform
from tests.ranks import Ranks

cpu_platform.install()


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "backends/megatron_utils" in item.nodeid:
            item.add_marker(pytest.mark.megatron)
