import os
from pathlib import Path

import pytest

from miles.core import places
from miles.core.places import free_space, reason_against, reason_against_reading


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


def test_what_can_be_read_or_is_not_there_has_no_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file", tmp_path / "none", tmp_path / "file" / "below"):
        assert reason_against_reading(place) is None


def test_what_cannot_be_asked_for_has_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path / "loop", tmp_path / ("a" * 300)):
        assert "cannot be reached" in (reason_against_reading(place) or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_place_without_permission_has_one(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    (tmp_path / "file").touch(mode=0)
    closed.chmod(0)
    assert "no permission" in (reason_against_reading(closed) or "")
    assert "no permission" in (reason_against_reading(tmp_path / "file") or "")
    assert "Permission denied" in (reason_against_reading(closed / "inner") or "")
    closed.chmod(0o700)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_a_file_system_in_memory_is_told_from_the_nearest_folder_that_is_there() -> None:
    assert places.lies_in_memory("/dev/shm")
    assert places.lies_in_memory("/dev/shm/not/there/yet")
    assert not places.lies_in_memory("/")
    # A longer name that only begins like the mount is not in it.
    assert not places.lies_in_memory("/dev/shmoo")


def test_what_is_free_is_told_of_the_nearest_directory_that_is_there(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "gone" / "too"):
        assert free_space(directory).endswith(f" MiB are free in {tmp_path}")
    free = float(free_space("/proc").split(" MiB")[0])
    assert free == 0.0
    assert "File name too long" in free_space("x" * 300)
