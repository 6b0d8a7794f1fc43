"""Conversion tools as jobs of a rank."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest

from tests.unit.backends.fsdp_utils.jobs import file_size_limit


def on_full_disk(tool: Callable[[list[str]], None], argv: list[str], limit: int) -> tuple[int, str]:
    """The exit code of a tool and what it says when rank 0 can write no file beyond ``limit``."""
    said = io.StringIO()
    with file_size_limit(limit), redirect_stderr(said), pytest.raises(SystemExit) as ended:
        tool(argv)
    return ended.value.code, said.getvalue()
