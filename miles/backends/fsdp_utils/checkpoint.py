"""Checkpoints of this backend: one DCP directory each for model, optimizer and LR schedule, the
random state of every rank, metadata. ``training_utils/checkpoints.py`` knows what they are called.

DCP directories hold nothing but tensors under names, so that reading one unpickles no values (DCP's
own ``.metadata`` index is a pickle).
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from miles.backends.training_utils import checkpoints
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

    def __init__(self, config: CheckpointConfig, seed: int, timeout_minutes: float) -> None:
        self._config = config
        self._seed = seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        # Its own group: a save in the background must not meet the collectives of training.
        group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def find(self) -> Path | None:
        """The step that ``--load`` names, its files complete; ``None`` for a fresh start.

        Raises ``ConfigError`` on rank 0 and an error that quotes it elsewhere.
        """
        step: Path | None = None
        error: Exception | None = None
        if distributed.rank() == 0:
            try:
                if self._config.save is not None:
                    checkpoints.recover(self._config.save)
                step = checkpoints.resolve_load(self._config.load)
                if step is not None:
                    _check_backend(step, checkpoints.verify(step))
            except (OSError, ConfigError) as caught:
                error = caught
        distributed.raise_together(error, "--load")
        return distributed.broadcast_object(step)

    def save(self, iteration: int, snapshot: Snapshot, *, force_sync: bool) -> None:
        """Write the checkpoint of ``iteration`` completed rollouts, in the background under
        ``--async-save`` unless ``force_sync``.

        First waits for a save still being written and raises what went wrong with it. Any failure
        is raised on every rank and leaves older checkpoints and the tracker as they were.
        """
        self.finish()
        save = self._config.save
        assert save is not None, "--save"
        error: Exception | None = None
        if distributed.rank() == 0:
            try:
                checkpoints.prepare_staging(save, iteration, _ENTRIES)
            except OSError as caught:
                error = caught
        distributed.raise_together(error, f"checkpoint {iteration}")
        if self._config.async_save and not force_sync:
            copied = _copied_to_host(snapshot)
            self._in_flight = self._thread.submit(self._write, save, iteration, copied)
        else:
            self._write(save, iteration, snapshot)

    def finish(self) -> None:
        """Wait for the save in the background; raise its error."""
        pending, self._in_flight = self._in_flight, None
        if pending is not None:
            pending.result()

    def load(self, step: Path, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Read the parts in place, set this rank's random state, return the metadata.

        The number of ranks may differ from the one that saved. Raises ``ConfigError``.
        """
        metadata = checkpoints.read_metadata(step)
        for name, tensors in parts.items():
            reader = FileSystemReader(step / name)
            try:
                _check_nothing_is_left_over(reader, tensors)
                dcp_load(tensors, storage_reader=reader, process_group=self._group)
            except (CheckpointException, RuntimeError, ValueError, OSError) as error:
                reason = f"step {metadata['iteration']} does not fit this model: {step / name}"
                problem = Problem("--load", str(step.parent), f"{reason}: {_causes(error)}")
                raise ConfigError([problem]) from error
        self._restore_rng(step, metadata)
        return metadata

    def has(self, step: Path, part: str) -> bool:
        """Whether the checkpoint holds that part; the same answer on every rank."""
        return distributed.broadcast_object((step / part).is_dir())

    def _restore_rng(self, step: Path, metadata: Mapping[str, Any]) -> None:
        saved_ranks = metadata.get("world_size")
        if saved_ranks == distributed.world_size():
            device.set_rng_state(load_file(step / _rng_file()))
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

    def _write(self, save: str, iteration: int, snapshot: Snapshot) -> None:
        what = f"checkpoint {iteration}"
        staging = checkpoints.staging_dir(save, iteration)
        self._together(lambda: self._write_parts(staging, snapshot), what, save, iteration)

        def publish() -> None:
            if distributed.rank() == 0:
                checkpoints.publish(save, iteration, snapshot.metadata)
                checkpoints.prune(save, self._config.save_keep)

        self._together(publish, what, save, iteration)
        if distributed.rank() == 0:
            log.info("saved %s", checkpoints.step_dir(save, iteration))

    def _write_parts(self, staging: Path, snapshot: Snapshot) -> None:
        for name, tensors in snapshot.parts.items():
            dcp_save(
                dict(tensors),
                storage_writer=FileSystemWriter(staging / name, sync_files=True),
                process_group=self._group,
            )
        save_file(snapshot.rng, staging / _rng_file())

    def _together(self, action: Callable[[], None], what: str, save: str, iteration: int) -> None:
        """Run on every rank; an error on any is raised on all, the attempt's files are removed."""
        error: Exception | None = None
        try:
            action()
        except CheckpointException as caught:  # not an ``Exception``
            error = OSError(f"{what}: {_causes(caught)}")
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        try:
            distributed.raise_together(error, what, self._group)
        except Exception:
            if distributed.rank() == 0:
                checkpoints.discard_staging(save, iteration)
            raise


def derived_seed(seed: int, step: int, rank: int) -> int:
    """A seed for one rank at one step, unrelated to those of other ranks and steps."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _rng_file() -> str:
    return f"rng_{distributed.rank():05d}.safetensors"


def _check_backend(step: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("backend") != BACKEND:
        writer = metadata.get("backend")
        remedy = f"{step} was written by the {writer} backend, this run is {BACKEND}"
        raise ConfigError([Problem("--load", str(step.parent), remedy)])


def _check_nothing_is_left_over(reader: FileSystemReader, tensors: Part) -> None:
    """DCP itself refuses only what is missing: a part of a larger model would load."""
    surplus = reader.read_metadata().state_dict_metadata.keys() - tensors.keys()
    if surplus:
        shown = ", ".join(sorted(surplus)[:3])
        raise ValueError(f"it holds {len(surplus)} tensors more than the model has: {shown}")


def _causes(error: BaseException) -> str:
    """What went wrong on which rank, without the tracebacks that DCP makes part of its message."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _) in error.failures.items()
    )


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
