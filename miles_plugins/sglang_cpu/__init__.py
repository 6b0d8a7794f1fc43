"""Released SGLang on a machine without an accelerator, through its own platform entry point.

SGLang calls ``activate`` in each of its processes (entry-point group ``sglang.srt.platforms``).
"""

import os


def activate() -> str | None:
    """The platform class for SGLang to use; ``None`` leaves the choice to SGLang.

    That is where there is an accelerator, and where SGLang's own CPU engine (``sgl_kernel``) is
    asked for.
    """
    from miles.core import device

    if device.has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return f"{__name__}.platform:TorchCpuPlatform"
