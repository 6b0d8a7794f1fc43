"""Whether a directory that a run is to write can be made."""

import os
from pathlib import Path


def reason_against(directory: str) -> str | None:
    """Why no file can be written into ``directory``, which may be missing yet; ``None``: one can.

    Makes nothing, so that it may still fail when the time comes (a full disk).
    """
    folder = Path(directory).absolute()
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
    except OSError as error:
        return f"cannot be reached: {error}"
    if not existing.is_dir():
        what = "is a file" if existing == folder else f"lies in {existing}, which is a file"
        return f"{what}; give a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"cannot be written: no permission in {existing}"
    return None
