"""What the files of a machine's devices say of it."""

import sys
from pathlib import Path

import pytest

from miles.core.device_files import may_have_accelerator


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other files")
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("null", False),
        ("nvidia-caps", False),
        ("nvidiactl", True),
        ("kfd", True),
        ("dri/card0", False),
        ("dri/renderD128", True),
        ("accel/accel0", True),
    ],
)
def test_a_machine_may_have_an_accelerator_where_there_is_the_file_of_one(
    tmp_path: Path, file: str, expected: bool
) -> None:
    device = tmp_path / file
    device.parent.mkdir(exist_ok=True)
    device.touch()
    assert may_have_accelerator(tmp_path) is expected
