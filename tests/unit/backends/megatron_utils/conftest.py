"""Megatron in this process and on ranks of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.backends.megatron_utils import cpu_platform
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.made_lines import Line, make_line
from tests.unit.backends.megatron_utils.made_models import make_models

cpu_platform.install()


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("megatron-models"))


@pytest.fixture
def line(tiny_qwen3: Path, tmp_path: Path) -> Line:
    return make_line(tiny_qwen3, tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "backends/megatron_utils" in item.nodeid:
            item.add_marker(pytest.mark.megatron)
