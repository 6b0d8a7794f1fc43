"""Which SGLang is there, without importing it (that takes seconds), and which engine a job gets."""

import importlib.metadata
import importlib.util
import os

from miles.config.derived import needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.core.device_files import may_have_accelerator

TESTED_VERSIONS = "sglang==0.5.16, sglang-router==0.3.2"
"""Those of the extra ``sglang``."""
UNSERVED_TOKENS = 6
"""SGLang refuses inputs of ``min(context_length, max_total_num_tokens) - 6`` tokens or more
(``max_req_input_len`` of ``/server_info``), and a response that is aborted goes on as an input."""
PLATFORM_GROUP = "sglang.srt.platforms"
PLATFORM_NAME = "miles_cpu"


def is_installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def has_router() -> bool:
    return importlib.util.find_spec("sglang_router") is not None


def version() -> str:
    """Of the installed package, ``unknown`` for a checkout on PYTHONPATH."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def choose_engine(config: MilesConfig) -> tuple[str, str]:
    """The engine that ``--rollout-engine`` stands for, ``sglang`` or ``embedded``, and why."""
    name = config.rollout.rollout_engine
    if name != "auto":
        return name, "asked for"
    if config.rollout.deterministic_rollout:
        return "embedded", "--deterministic-rollout needs it"
    if not is_installed():
        return "embedded", "sglang is not installed"
    if not has_accelerator():
        elsewhere = "; --rollout-engine sglang if the machines of RAY_ADDRESS have some"
        hint = elsewhere if os.environ.get("RAY_ADDRESS") else ""
        return "embedded", f"there is no accelerator on this machine{hint}"
    return "sglang", "there are an accelerator and the sglang package"


def unserved_tokens(config: MilesConfig) -> int:
    """How many tokens fewer than the context, or than the key/value cache, a request may have."""
    engine = choose_engine(config)[0] if needs_engines(config) else "none"
    return UNSERVED_TOKENS if engine == "sglang" else 0


def has_accelerator() -> bool:
    """Imports torch only where there may be one: most command lines are checked without."""
    if not may_have_accelerator():
        return False
    from miles.core import device

    return device.has_accelerator()


def problem() -> Problem | None:
    """Why SGLang cannot serve here; ``None`` when it can."""
    if not is_installed():
        remedy = f"{missing()}, or use --rollout-engine embedded"
        return Problem("--rollout-engine", "sglang", remedy)
    if not has_accelerator() and not _has_cpu_platform():
        remedy = (
            "serves without an accelerator through an entry point of Miles, which this "
            "installation of it does not declare: pip install --no-deps -e . (or use "
            "--rollout-engine embedded)"
        )
        return Problem("--rollout-engine", "sglang", remedy)
    return None


def missing() -> str:
    """What to do where SGLang is not installed."""
    return (
        f"needs SGLang, which is not installed: pip install 'miles[sglang]' ({TESTED_VERSIONS}) on "
        "a machine with an accelerator, or run `make sglang-cpu` on one without"
    )


def _has_cpu_platform() -> bool:
    return PLATFORM_NAME in importlib.metadata.entry_points(group=PLATFORM_GROUP).names
