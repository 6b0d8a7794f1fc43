"""Megatron in this process, and command lines for it."""

from pathlib import Path

import pytest

from miles.backends.megatron_utils import cpu_platform
from tests.unit.backends.megatron_utils.made_lines import Line, make_line

cpu_platform.install()


@pytest.fixture
def line(tiny_qwen3: Path, tmp_path: Path) -> Line:
    return make_line(tiny_qwen3, tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "backends/megatron_utils" in item.nodeid:
            item.add_marker(pytest.mark.megatron)
