"""Directories that a run reads and writes do not get in each other's way."""

import os
from pathlib import Path

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem


def run_directory_is_its_own(config: MilesConfig, given: Given) -> list[Problem]:
    """Records and checkpoints lie apart: a fresh start sets the records of an earlier run aside,
    and never touches checkpoints."""
    run_dir = config.observability.run_dir
    if run_dir is None:
        return []
    remedy = (
        "records and checkpoints need a directory each; give the checkpoints one within it: "
        f"{os.path.join(run_dir, 'checkpoints')}"
    )
    others = (("save", config.checkpoint.save), ("load", config.checkpoint.load))
    return [
        problem(config, "run_dir", dest, remedy=remedy)
        for dest, path in others
        if path is not None and os.path.realpath(path) == os.path.realpath(run_dir)
    ][:1]


def exports_replace_only_exports(config: MilesConfig, given: Given) -> list[Problem]:
    """An export replaces what is at its place; that is neither a model nor holds checkpoints or a
    run's records."""
    checkpoint = config.checkpoint
    if checkpoint.save_hf is None:
        return []
    target = os.path.abspath(checkpoint.save_hf)
    kept = (
        ("save", checkpoint.save),
        ("load", checkpoint.load),
        ("run_dir", config.observability.run_dir),
        ("hf_checkpoint", config.rollout.hf_checkpoint),
        ("ref_load", config.algorithm.ref_load),
    )
    remedy = "the export would replace the second; give it a directory of its own"
    return [
        problem(config, "save_hf", dest, remedy=remedy)
        for dest, path in kept
        if path is not None and Path(os.path.abspath(path)).is_relative_to(target)
    ][:1]


def exports_leave_checkpoints_their_names(config: MilesConfig, given: Given) -> list[Problem]:
    """Within --save, what begins with ``iter_`` or ``release`` is a checkpoint: exports there would
    be loaded, replaced and pruned as such."""
    save, target = config.checkpoint.save, config.checkpoint.save_hf
    if save is None or target is None:
        return []
    within = os.path.relpath(os.path.abspath(target), os.path.abspath(save))
    if not within.startswith(("iter_", "release")):
        return []
    remedy = (
        "names there that begin with iter_ or release are those of checkpoints; give exports "
        f"another, such as {os.path.join(save, 'hf_{rollout_id}')}"
    )
    return [problem(config, "save_hf", "save", remedy=remedy)]


def reference_is_not_overwritten(config: MilesConfig, given: Given) -> list[Problem]:
    """The run writes its checkpoints elsewhere than where its reference lies."""
    reference, save = config.algorithm.ref_load, config.checkpoint.save
    if reference is None or save is None or os.path.realpath(reference) != os.path.realpath(save):
        return []
    remedy = (
        "the run would write its checkpoints over its reference, and a resumed one would take the "
        "trained weights for it; give the second a directory of its own"
    )
    return [problem(config, "ref_load", "save", remedy=remedy)]


PLACE_CHECKS: tuple[Check, ...] = (
    run_directory_is_its_own,
    exports_replace_only_exports,
    exports_leave_checkpoints_their_names,
    reference_is_not_overwritten,
)
