import os
from pathlib import Path

import pytest

from miles.core import places
from miles.core.places import reason_against


def test_a_directory_that_is_there_or_can_be_made_is_fine(tmp_path: Path) -> None:
    assert reason_against(str(tmp_path)) is None
    assert reason_against(str(tmp_path / "a" / "b")) is None
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert reason_against(str(file)) == "is a file; give a directory"
    below = reason_against(str(file / "run"))
    assert below is not None
    assert f"lies in {file}, which is a file" in below


def test_the_kernels_own_folders_take_no_files(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/proc/sys")
    for folder in ("/proc", "/proc/run", "/sys/kernel/run", str(link / "run")):
        reason = reason_against(folder)
        assert reason is not None
        assert "which holds no files of users" in reason
    assert reason_against("/dev/shm") is None


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_a_file_system_in_memory_is_told_from_the_nearest_folder_that_is_there() -> None:
    assert places.lies_in_memory("/dev/shm")
    assert places.lies_in_memory("/dev/shm/not/there/yet")
    assert not places.lies_in_memory("/")
    # A longer name that only begins like the mount is not in it.
    assert not places.lies_in_memory("/dev/shmoo")
