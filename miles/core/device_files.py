"""Whether this machine can have an accelerator, told without torch, whose import takes seconds."""

import sys
from pathlib import Path

DEVICE_FILES = (
    "nvidiactl",
    "dxg",
    "kfd",
    "davinci_manager",
    "dri/renderD*",
    "accel/accel*",
)
"""Below ``/dev``: what the drivers of NVIDIA, of WSL, AMD, Ascend, Intel and Gaudi open. A display
may have one of them too."""


def may_have_accelerator(devices: Path = Path("/dev")) -> bool:
    """``False`` is certain; where it is ``True``, ask ``core.device``."""
    if sys.platform != "linux":
        return True
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_FILES)
