"""What is wrong with the directories of a conversion, told before it reads or writes a tensor."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from miles.backends.training_utils import checkpoints
from miles.backends.training_utils.export_mark import reason_against_replacing
from miles.config.errors import ConfigError, Problem
from miles.core import hf, places

_TOOLS = {"fsdp": "tools/convert_fsdp_to_hf.py", "megatron": "tools/convert_torch_dist_to_hf.py"}
"""What converts the checkpoints of each backend."""

_STAGED = (checkpoints.staging_dir("", 0).name, f"{checkpoints.TRACKER}.tmp")
"""What a conversion to a checkpoint writes before it is whole."""

_SHOWN = 3
"""So many files of a target that is not empty are named."""


def check_model(hf_checkpoint: str) -> list[Problem]:
    """``--hf-checkpoint`` is a whole Hugging Face directory."""
    if not hf_checkpoint:
        return [Problem("--hf-checkpoint", "", "is required: the model's Hugging Face directory")]
    try:
        hf.check_directory(hf_checkpoint)
    except hf.CheckpointDirError as error:
        return [Problem("--hf-checkpoint", hf_checkpoint, str(error))]
    return []


def check_step(load: str, backend: str, hf_checkpoint: str) -> list[Problem]:
    """``--load`` holds a complete step that ``backend`` wrote of the model in ``hf_checkpoint``."""
    if not load:
        return [Problem("--load", "", "is required: the checkpoint, which is the parent of iter_*")]
    try:
        reason = _reason_against_step(load, backend, hf_checkpoint)
    except ConfigError as error:
        return list(error.problems)
    return [] if reason is None else [Problem("--load", load, reason)]


def check_new_checkpoint(save: str, *sources: str) -> list[Problem]:
    """``--save`` is a place for a checkpoint: nothing is there but what a conversion that was
    interrupted left. ``sources`` are the directories that are converted."""
    reason = _reason_against_place(save, sources) or _reason_against_mixing(
        entry for entry in _entries(save) if not _is_leftover(entry)
    )
    return _check_target(save, reason)


def check_new_model(save: str, *sources: str) -> list[Problem]:
    """``--save`` is a place for a Hugging Face directory, which is written beside it."""
    target = os.path.realpath(save)
    reason = (
        _reason_against_place(save, sources)
        or _reason_against_mixing(_entries(save))
        or reason_against_replacing(target)
        or places.reason_against(os.path.dirname(target))
    )
    return _check_target(save, reason)


def _reason_against_step(load: str, backend: str, hf_checkpoint: str) -> str | None:
    """Raises ``ConfigError`` for what is no complete step."""
    step = checkpoints.resolve_load(load, announce=False)
    if step is None:
        missing = not Path(load).exists()
        return "does not exist" if missing else "holds no checkpoint; give the parent of iter_*"
    metadata = checkpoints.verify(step)
    writer = metadata.get("backend")
    if writer != backend:
        tool = _TOOLS.get(str(writer), "another tool")
        return f"{step} was written by the {writer} backend; {tool} converts it"
    differences = checkpoints.model_differences(metadata, checkpoints.model_of(hf_checkpoint))
    if differences:
        found = ", ".join(differences)
        return f"{step} is of another model than --hf-checkpoint ({found}); give the one that fits"
    return None


def _check_target(save: str, reason: str | None) -> list[Problem]:
    if not save:
        return [Problem("--save", "", "is required: the directory to write")]
    return [] if reason is None else [Problem("--save", save, reason)]


def _reason_against_place(save: str, sources: Sequence[str]) -> str | None:
    target = Path(os.path.realpath(save))
    for source in (Path(os.path.realpath(source)) for source in sources if source):
        if target == source:
            return "is the directory that is converted; give another"
        if source in target.parents and (source / "config.json").is_file():
            return f"lies in the model {source}; give another"
    return places.reason_against(save) or places.reason_against_reading(save)


def _entries(save: str) -> list[Path]:
    return sorted(Path(save).iterdir()) if Path(save).exists() else []


def _reason_against_mixing(entries: Iterable[Path]) -> str | None:
    names = [entry.name for entry in entries]
    if not names:
        return None
    more = ", ..." if len(names) > _SHOWN else ""
    return (
        f"is not empty ({', '.join(names[:_SHOWN])}{more}), and a conversion replaces nothing; "
        "give another directory, or remove this one yourself"
    )


def _is_leftover(entry: Path) -> bool:
    """Whether a conversion to a checkpoint left this when it was interrupted."""
    if entry.name != checkpoints.RELEASE:
        return entry.name in _STAGED
    if (entry.parent / checkpoints.TRACKER).exists():
        return False
    try:
        return "source" in checkpoints.read_metadata(entry)
    except ConfigError:
        return False
