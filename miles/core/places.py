"""Whether a place can be read, and what a directory is that a run is to write into."""

import os
import shutil
import stat
from pathlib import Path

KERNEL_FOLDERS = (Path("/proc"), Path("/sys"))
"""Interfaces of the kernel. root has the permission to write there, and no file can be made."""


def reason_against(directory: str) -> str | None:
    """Why no file can be written into ``directory``, which may be missing yet; ``None``: one can.

    Makes nothing, so that it may still fail when the time comes (a full disk).
    """
    folder = Path(directory).absolute()
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
    except OSError as error:
        return f"cannot be reached: {error}"
    real = existing.resolve()
    for kernel in KERNEL_FOLDERS:
        if real.is_relative_to(kernel):
            return f"lies in {kernel}, which holds no files of users; give a directory on a disk"
    if not existing.is_dir():
        what = "is a file" if existing == folder else f"lies in {existing}, which is a file"
        return f"{what}; give a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"cannot be written: no permission in {existing}"
    return None


def reason_against_reading(path: str | Path) -> str | None:
    """Why the file or directory at ``path`` cannot be read; ``None``: it can, or nothing is there.

    What follows may ask with ``Path.is_file`` and its like, which raise where this has a reason.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot be reached: {error}"
    needed = os.R_OK | os.X_OK if stat.S_ISDIR(mode) else os.R_OK
    return None if os.access(path, needed) else f"cannot be read: no permission for {path}"


def free_space(directory: str | Path) -> str:
    """What is free where ``directory``, which may be missing yet, lies: for the message of a write
    that failed. Raises nothing."""
    place = Path(directory).absolute()
    try:
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return f"{free / 2**20:,.1f} MiB are free in {existing}"


def lies_in_memory(directory: str) -> bool:
    """Whether files in ``directory``, which may be missing yet, would lie in host memory."""
    place = Path(directory).absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists()).resolve()
    innermost, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        # Of two mounts at one place the later one is seen.
        if existing.is_relative_to(mount) and len(mount) >= len(innermost):
            innermost, kind = mount, name
    return kind in ("tmpfs", "ramfs")
