"""Checkpoint directories without tensors: names, tracker, staging, retention, the save sentinel.

A step is written to ``iter_0000012.tmp`` and renamed when every file is on disk; only then does the
tracker move. What ends in neither ``.tmp``, ``.old`` nor ``.gone`` is therefore always complete.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.config import record
from miles.config.errors import ConfigError, Problem
from miles.core import hf, logging, places

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
RELEASE = "release"
"""Megatron-LM's name for weights that no step has changed: in its tracker and as directory."""
REQUESTED = "requested"
"""Empty file in a step that was asked for by the sentinel: retention leaves the step alone."""
WEIGHTS_ONLY = {"weights_only": True}
"""In the metadata of converted weights: rollout 0 starts from them, nothing else is resumed."""
MODEL = "model"
"""In the metadata: ``model_of`` the step. Older steps, and Megatron-LM's own, have none."""

_STEP = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"(?:iter_\d{7,}|release)\.(?:tmp|gone)")
_REPLACED = re.compile(r"(iter_\d{7,}|release)\.old")

log = logging.get(__name__)


def step_dir(save: str | Path, iteration: int) -> Path:
    """Directory of a finished checkpoint; ``iteration`` counts completed rollouts, 0 is that of
    converted weights."""
    return Path(save) / (RELEASE if iteration == 0 else f"iter_{iteration:07d}")


def staging_dir(save: str | Path, iteration: int) -> Path:
    """Where that checkpoint is written until it is complete."""
    final = step_dir(save, iteration)
    return final.with_name(final.name + ".tmp")


def prepare_staging(save: str | Path, iteration: int, backend_entries: Sequence[str]) -> Path:
    """Make the staging directory, without what a failed attempt of the backend left there.

    Other files stay: the driver puts its rollout state and the ``requested`` marker there first.
    ``backend_entries`` are glob patterns.
    """
    staging = staging_dir(save, iteration)
    staging.mkdir(parents=True, exist_ok=True)
    for pattern in (*backend_entries, METADATA):
        for entry in staging.glob(pattern):
            _remove(entry)
    return staging


def mark_requested(save: str | Path, iteration: int) -> None:
    """Record durably, before the save, that the sentinel asked for this step."""
    staging = staging_dir(save, iteration)
    staging.mkdir(parents=True, exist_ok=True)
    (staging / REQUESTED).touch()


def discard_staging(save: str | Path, iteration: int) -> None:
    """Remove a failed attempt, which frees the disk it filled."""
    shutil.rmtree(staging_dir(save, iteration), ignore_errors=True)


def publish(save: str | Path, iteration: int, metadata: Mapping[str, Any]) -> Path:
    """Make the staged checkpoint the current one: metadata, fsync, rename, then the tracker.

    Called on one rank when every rank has written. ``metadata`` is stored with the size of each
    file, which ``verify`` compares before anything is loaded. Raises ``OSError``; the older
    checkpoint and the tracker are then as they were.
    """
    staging, final = staging_dir(save, iteration), step_dir(save, iteration)
    sizes = {
        str(path.relative_to(staging)): path.stat().st_size
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({**metadata, "iteration": iteration, "files": sizes}, indent=1)
    (staging / METADATA).write_text(text, encoding="utf-8")
    _sync_tree(staging)
    replaced = _replaced(final)
    if final.exists():
        final.rename(replaced)
    staging.rename(final)
    _sync(final.parent)
    _write_tracker(Path(save), iteration)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def read_tracker(load: str | Path) -> int | None:
    """Iteration of the newest complete checkpoint (of ``release``: 0); ``None`` without a tracker.

    Raises ``ConfigError`` when the file holds anything else.
    """
    path = Path(load) / TRACKER
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    released = step_dir(load, 0)
    if text == RELEASE and (released.is_dir() or _replaced(released).is_dir()):
        return 0
    if not (text.isascii() and text.isdigit()):
        raise _refused(load, f"{path} holds {text[:40]!r} instead of a step number; {_steps(load)}")
    return int(text)


def resolve_load(load: str | None, *, announce: bool = True) -> Path | None:
    """Directory of the step to resume from, or ``None`` for a fresh start, which is logged by the
    one of a job's processes that is to ``announce`` it.

    Fresh: no ``--load``; a missing or empty directory; one with neither tracker nor ``iter_*``.
    Everything else that is not a complete checkpoint raises ``ConfigError``.
    """
    if load is None:
        return None
    folder = Path(load)
    _refuse_unreadable(folder)
    if not folder.exists():
        if announce:
            log.info("--load %s does not exist yet: fresh start", load)
        return None
    if not folder.is_dir():
        raise _refused(load, "is a file; give the directory that holds iter_*")
    _refuse_other_kinds(folder)
    iteration = read_tracker(folder)
    if iteration is None:
        if _iterations(folder):
            raise _refused(
                load, f"has no {TRACKER}; write one step's number there ({_steps(folder)})"
            )
        if announce:
            log.info("--load %s holds no checkpoint yet: fresh start", load)
        return None
    final = step_dir(folder, iteration)
    for step in (final, _replaced(final)):
        if step.is_dir():
            return step
    raise _refused(load, f"{TRACKER} says {iteration} but {final} is missing; {_steps(folder)}")


def check_load(load: str | None, backend: str, hf_checkpoint: str | None = None) -> list[Problem]:
    """The same rules when the command line is parsed, plus sizes of the files and that ``backend``
    wrote them of the model in ``hf_checkpoint``; reads no tensor."""
    try:
        step = resolve_load(load, announce=False)
        if step is not None:
            metadata = verify(step)
            check_backend(step, metadata, backend)
            check_model(step, metadata, model_of(hf_checkpoint))
    except ConfigError as error:
        return list(error.problems)
    return []


def check_backend(step: Path, metadata: Mapping[str, Any], backend: str) -> None:
    """Raise ``ConfigError`` for a checkpoint that another backend wrote."""
    writer = metadata.get("backend")
    if writer != backend:
        remedy = (
            f"{step} was written by the {writer} backend, this run is {backend}; train with that "
            "one, or convert the checkpoint (docs/conversion.md)"
        )
        raise ConfigError([Problem("--load", str(step.parent), remedy)])


def model_of(hf_checkpoint: str | None) -> dict[str, str | int]:
    """Which model a directory is of; empty where it does not say, which has its own rule."""
    try:
        return {} if hf_checkpoint is None else hf.stated_model(hf_checkpoint)
    except hf.CheckpointDirError:
        return {}


def check_model(step: Path, metadata: Mapping[str, Any], model: Mapping[str, str | int]) -> None:
    """Raise ``ConfigError`` for a checkpoint of another model."""
    differences = model_differences(metadata, model)
    if differences:
        remedy = (
            f"{step} is of another model than --hf-checkpoint ({', '.join(differences)}); give the "
            "--hf-checkpoint that it was trained from, or a checkpoint of this one; to start "
            "afresh, one directory without steps as --load and --save"
        )
        raise ConfigError([Problem("--load", str(step.parent), remedy)])


def model_differences(metadata: Mapping[str, Any], model: Mapping[str, str | int]) -> list[str]:
    """Where a step is of another ``model``; what either does not say is left to the shapes of its
    tensors."""
    saved = metadata.get(MODEL)
    if not isinstance(saved, dict):
        return []
    return [
        f"{name} {saved[name]} instead of {value}"
        for name, value in model.items()
        if name in saved and saved[name] != value
    ]


def first_rollout_id(load: str | None) -> int:
    """The rollout that a run goes on with. Raises ``ConfigError`` as ``resolve_load`` does."""
    step = resolve_load(load, announce=False)
    if step is None or is_weights_only(step):
        return 0
    return int(read_metadata(step)["iteration"])


def holds_steps(directory: str) -> bool:
    """Whether ``directory`` looks like the place or a step of training checkpoints; one that
    cannot be read does not."""
    folder = Path(directory)
    if places.reason_against_reading(folder) is not None:
        return False
    return (
        (folder / TRACKER).exists()
        or bool(_iterations(folder))
        or _STEP.fullmatch(folder.name) is not None
    )


def read_metadata(step: Path) -> dict[str, Any]:
    """What ``publish`` stored. Raises ``ConfigError`` when it is missing or unreadable.

    A step that Megatron-LM itself (or its converters) wrote counts as weights only: its iterations
    are not rollouts of ours.
    """
    try:
        metadata = json.loads((step / METADATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = f"{step} has no {METADATA}: it is not a complete checkpoint of this program"
        raise _refused(step.parent, f"{reason}; {_steps(step.parent)}") from None
    except ValueError as error:
        raise _refused(step.parent, f"{step / METADATA} is not readable: {error}") from error
    if isinstance(metadata, dict) and "sharded_backend" in metadata and "files" not in metadata:
        return {"backend": "megatron", "iteration": 0, "files": {}, **WEIGHTS_ONLY}
    complete = isinstance(metadata, dict) and {"files", "iteration"} <= metadata.keys()
    if not complete or not isinstance(metadata["files"], dict):
        raise _refused(step.parent, f"{step / METADATA} lists no files")
    return metadata


def is_weights_only(step: Path) -> bool:
    """Whether the step is where a run starts rather than where one stopped."""
    return bool(read_metadata(step).get("weights_only", False))


def verify(step: Path) -> dict[str, Any]:
    """Return the metadata after checking that every file is there in full length."""
    metadata = read_metadata(step)
    faults: list[str] = []
    for name, size in metadata["files"].items():
        path = step / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != size:
            faults.append(f"{path} has {path.stat().st_size} bytes instead of {size}")
    if faults:
        reason = f"{_named(step, metadata)} is damaged: {'; '.join(faults)}"
        raise _refused(step.parent, f"{reason}. {_remedy(step)}")
    return metadata


def damaged(step: Path, file: Path) -> str:
    """What to tell of a file of ``step`` that cannot be read though its size is right."""
    return f"{_named(step, read_metadata(step))}: {file} is damaged or missing. {_remedy(step)}"


def _named(step: Path, metadata: Mapping[str, Any]) -> str:
    return "what was converted" if step.name == RELEASE else f"step {metadata['iteration']}"


def _remedy(step: Path) -> str:
    """Of a step that is damaged."""
    if step.name == RELEASE:
        return "Restore it, or convert again"
    others = [
        number for number in _iterations(step.parent) if step_dir(step.parent, number) != step
    ]
    if not others:
        return "Restore it; it is the only step there"
    shown = ", ".join(map(str, others))
    return f"Restore it, or write another step into {step.parent / TRACKER} (there are {shown})"


def recover(save: str | Path) -> None:
    """Clear up after a crash: remove half-written steps, put back one that was being replaced."""
    for entry in sorted(Path(save).glob("*")):
        if _LEFTOVER.fullmatch(entry.name):
            log.info("removing left-over %s", entry)
            _remove(entry)
        elif match := _REPLACED.fullmatch(entry.name):
            original = entry.with_name(match[1])
            if original.exists():
                _remove(entry)
            else:
                entry.rename(original)


def prune(save: str | Path, keep: int | None) -> list[Path]:
    """Remove all but the newest ``keep`` steps; return those removed.

    Steps beyond the tracker's belong to another history of the run and are left alone, as are the
    tracker's own step and those that the sentinel asked for.
    """
    newest = read_tracker(save)
    if keep is None or newest is None:
        return []
    old = [i for i in _iterations(save) if i <= newest][:-keep]
    removed: list[Path] = []
    for step in (step_dir(save, i) for i in old if i != newest):
        if not (step / REQUESTED).exists():
            gone = step.with_name(step.name + ".gone")
            step.rename(gone)
            shutil.rmtree(gone)
            removed.append(step)
    return removed


def sentinel_requested(path: str | None) -> bool:
    """Whether someone asked for a save by touching the sentinel file."""
    return path is not None and Path(path).exists()


def clear_sentinel(path: str) -> None:
    """Tell whoever asked that the checkpoint is durable."""
    Path(path).unlink(missing_ok=True)


def _refuse_other_kinds(folder: Path) -> None:
    if _STEP.fullmatch(folder.name) and not _iterations(folder):
        raise _refused(folder, f"is one step; give its parent directory {str(folder.parent)!r}")
    if not (folder / TRACKER).exists() and any(
        any(folder.glob(pattern)) for pattern in (".metadata", "*.distcp", "metadata.json")
    ):
        raise _refused(folder, "lies within a step; give the directory that holds iter_*")
    if (folder / record.FILE).is_file() and not (folder / TRACKER).exists():
        run = record.read_record(folder)
        if run is not None:
            raise _refused(folder, run_directory_of(run))
        raise _refused(
            folder,
            "is a Hugging Face directory, which --hf-checkpoint (or --ref-load) takes; --load "
            "takes a directory that this program saved to",
        )


def run_directory_of(run: Mapping[str, Any]) -> str:
    """What is wrong with a run directory, known by its record, in the place of checkpoints."""
    save = run["checkpoint"].get("save")
    holds = "is the run directory of a run (metrics, samples, logs)"
    if save is None:
        return f"{holds}, which saved no checkpoints (no --save)"
    return f"{holds}; its checkpoints are in {save!r} (that run's --save)"


def _iterations(folder: str | Path) -> list[int]:
    matches = (_STEP.fullmatch(p.name) for p in Path(folder).glob("iter_*") if p.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def _steps(folder: str | Path) -> str:
    found = _iterations(folder)
    return f"steps there: {', '.join(map(str, found))}" if found else "no step is there"


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def _refuse_unreadable(load: Path) -> None:
    reason = places.reason_against_reading(load)
    if reason is not None:
        raise _refused(load, reason)


def _refused(load: str | Path, remedy: str) -> ConfigError:
    return ConfigError([Problem("--load", str(load), remedy)])


def _write_tracker(save: Path, iteration: int) -> None:
    temporary = save / f"{TRACKER}.tmp"
    temporary.write_text(RELEASE if iteration == 0 else str(iteration), encoding="utf-8")
    _sync(temporary)
    temporary.replace(save / TRACKER)
    _sync(save)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()
