"""Which megatron-core a process would import, found out without importing it (that takes seconds).

A checkout on PYTHONPATH goes before an installed wheel and has no metadata of its own, so the
version is read from its source.
"""

import importlib.util
import re
from pathlib import Path

from miles.config.errors import Problem

TESTED_VERSION = "0.19.2"
"""The shim for machines without CUDA and our modules rely on details of this one."""

_FIELD = re.compile(
    r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?([\w.]*)['\"]?\s*$", re.MULTILINE
)


def problem() -> Problem | None:
    """Why Megatron cannot be used here; ``None`` when it can."""
    folder = _find()
    if folder is None:
        remedy = (
            "needs megatron-core, which is not installed: pip install -e '.[megatron]' "
            f"(megatron-core=={TESTED_VERSION}), put a checkout of that version on PYTHONPATH, or "
            "use --train-backend fsdp"
        )
        return Problem("--train-backend", "megatron", remedy)
    if not (folder / "training" / "arguments.py").is_file():
        remedy = (
            f"{folder} has no megatron.training; pip install -e '.[megatron]' "
            f"(megatron-core=={TESTED_VERSION})"
        )
        return Problem("--train-backend", "megatron", remedy)
    found = version_in(folder)
    if found == TESTED_VERSION:
        return None
    remedy = (
        f"found megatron-core {found or 'of an unknown version'} in {folder}, but this version of "
        f"Miles works with {TESTED_VERSION}: pip install -e '.[megatron]', or put a checkout of "
        f"core_v{TESTED_VERSION} on PYTHONPATH"
    )
    return Problem("--train-backend", "megatron", remedy)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def has_fused_weight_gradients() -> bool:
    """Whether Apex's kernel is installed that adds a weight's gradient to its fp32 buffer."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def version_in(folder: Path) -> str | None:
    """The version of the ``megatron`` package in ``folder``; ``None`` when it does not say."""
    source = folder / "core" / "package_info.py"
    if not source.is_file():
        return None
    fields = dict(_FIELD.findall(source.read_text(encoding="utf-8")))
    if not {"MAJOR", "MINOR", "PATCH"} <= fields.keys():
        return None
    return "{MAJOR}.{MINOR}.{PATCH}".format(**fields) + fields.get("PRE_RELEASE", "")


def _find() -> Path | None:
    """The ``megatron`` folder whose ``core`` Python would import."""
    spec = importlib.util.find_spec("megatron")
    locations = spec.submodule_search_locations if spec is not None else None
    folders = [Path(location) for location in locations or ()]
    return next((folder for folder in folders if (folder / "core").is_dir()), None)
