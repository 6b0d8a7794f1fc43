"""Checkpoints of this backend: one DCP directory each for model, optimizer and LR schedule, the
random state of every rank, metadata. ``training_utils/checkpoint_writer.py`` puts them in place.

DCP directories hold nothing but tensors under names, so that reading one unpickles no values (DCP's
own ``.metadata`` index is a pickle).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from miles.backends.training_utils import checkpoints, dcp_writing
from miles.backends.training_utils.checkpoint_writer import (
    CheckpointWriter,
    causes,
    derived_seed,
)
from miles.backends.training_utils.damage import damage_in, load_random_state
from miles.config.checkpoint import CheckpointConfig
from miles.config.errors import ConfigError, Problem
from miles.core import device, distributed, logging

BACKEND = "fsdp"
_ENTRIES = ("model", "optimizer", "lr_scheduler", "ref", "rng_*")

log = logging.get(__name__)

Part = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds of this rank."""

    parts: Mapping[str, Part]
    """Directory name -> tensors by name (DTensors: this rank's shard)."""
    rng: dict[str, Tensor]
    metadata: Mapping[str, Any]


class Checkpointer:
    """Writes checkpoints, at most one in the background, and reads them. Collective throughout."""

    def __init__(
        self,
        config: CheckpointConfig,
        hf_checkpoint: str | None,
        seed: int,
        timeout_minutes: float,
    ) -> None:
        self._seed = seed
        self.writer = CheckpointWriter(config, hf_checkpoint, BACKEND, _ENTRIES, timeout_minutes)

    def find(self) -> Path | None:
        """See ``CheckpointWriter.find``."""
        return self.writer.find()

    def save(self, iteration: int, snapshot: Snapshot, *, force_sync: bool) -> None:
        """Write the checkpoint of ``iteration`` completed rollouts, in the background under
        ``--async-save`` unless ``force_sync``.

        First waits for a save still being written and raises what went wrong with it. Any failure
        is raised on every rank and leaves older checkpoints and the tracker as they were.
        """
        self.writer.prepare(iteration)
        background = self.writer.in_background(force_sync=force_sync)
        held = _copied_to_host(snapshot) if background else snapshot
        self.writer.write(
            iteration,
            lambda staging: _write_parts(staging, held, self.writer.group),
            snapshot.metadata,
            background=background,
        )

    def finish(self) -> None:
        """Wait for the save in the background; raise its error."""
        self.writer.finish()

    def load(self, step: Path, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Read the parts in place, set this rank's random state, return the metadata.

        The number of ranks may differ from the one that saved. Raises ``ConfigError``.
        """
        metadata = checkpoints.read_metadata(step)
        for name, tensors in parts.items():
            reader = FileSystemReader(step / name)
            try:
                _check_nothing_is_left_over(reader, tensors)
                dcp_load(tensors, storage_reader=reader, process_group=self.writer.group)
            except CheckpointException as error:  # not an ``Exception``
                raise unreadable(step, step / name, error) from error
            except Exception as error:  # a damaged index, a pickle, may raise anything
                raise unreadable(step, step / name, error) from error
        self._restore_rng(step, metadata)
        return metadata

    def has(self, step: Path, part: str) -> bool:
        """Whether the checkpoint holds that part; the same answer on every rank."""
        return distributed.broadcast_object((step / part).is_dir())

    def _restore_rng(self, step: Path, metadata: Mapping[str, Any]) -> None:
        saved_ranks = metadata.get("world_size")
        if saved_ranks == distributed.world_size():
            device.set_rng_state(load_random_state(step, step / _rng_file()))
            return
        seed = derived_seed(self._seed, metadata["iteration"], distributed.rank())
        torch.manual_seed(seed)
        log.info(
            "checkpoint of %s ranks on %d: random state seeded from (seed %d, step %d, rank)",
            saved_ranks,
            distributed.world_size(),
            self._seed,
            metadata["iteration"],
        )


def unreadable(step: Path, part: Path, error: BaseException) -> ConfigError:
    """What to say of a part that could not be loaded: which file is damaged, else that the model is
    another."""
    number = checkpoints.read_metadata(step)["iteration"]
    misfit = (
        f"step {number} does not fit this model: {part}: {causes(error)}; if it is of another "
        "model than --hf-checkpoint, give that one"
    )
    return ConfigError([Problem("--load", str(step.parent), damage_in(step, part) or misfit)])


def _write_parts(staging: Path, snapshot: Snapshot, group: dist.ProcessGroup) -> None:
    for name, tensors in snapshot.parts.items():
        planner = dcp_writing.OneCopyPlanner()
        dcp_writing.write(staging / name, dict(tensors), group, planner)
    save_file(snapshot.rng, staging / _rng_file())


def _rng_file() -> str:
    return f"rng_{distributed.rank():05d}.safetensors"


def _check_nothing_is_left_over(reader: FileSystemReader, tensors: Part) -> None:
    """DCP itself refuses only what is missing: a part of a larger model would load."""
    surplus = reader.read_metadata().state_dict_metadata.keys() - tensors.keys()
    if surplus:
        shown = ", ".join(sorted(surplus)[:3])
        raise ValueError(f"it holds {len(surplus)} tensors more than the model has: {shown}")


def _copied_to_host(snapshot: Snapshot) -> Snapshot:
    """Training may change its tensors while the copy is written."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    parts: Any = stager.stage({name: dict(part) for name, part in snapshot.parts.items()})
    stager.close()
    return Snapshot(parts, snapshot.rng, snapshot.metadata)
