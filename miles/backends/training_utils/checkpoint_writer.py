"""Writes checkpoints one at a time, in the background if asked, and finds the one to resume from.

What lies in them is the backend's; ``checkpoints.py`` knows what they are called. Collective
throughout.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from miles.backends.training_utils import checkpoints
from miles.config.checkpoint import CheckpointConfig
from miles.config.errors import ConfigError
from miles.core import distributed, logging, places

log = logging.get(__name__)


class CheckpointWriter:
    """``prepare``, then ``write``; at most one of them is under way.

    ``hf_checkpoint`` tells of which model the steps are. ``entries`` are glob patterns of all that
    the backend writes into a step; ``timeout_minutes`` bounds what ranks wait for each other.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        hf_checkpoint: str | None,
        backend: str,
        entries: Sequence[str],
        timeout_minutes: float,
    ) -> None:
        self._config = config
        # Now, because its directory may be gone by the time of a save.
        self._model = checkpoints.model_of(hf_checkpoint)
        self._backend = backend
        self._entries = entries
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.in_flight: Future[None] | None = None
        # Its own group: a save in the background must not meet the collectives of training.
        group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

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
                    checkpoints.check_backend(step, checkpoints.verify(step), self._backend)
            except (OSError, ConfigError) as caught:
                error = caught
        distributed.raise_together(error, "--load")
        return distributed.broadcast_object(step)

    def prepare(self, iteration: int) -> None:
        """Wait for a save still being written, raise what went wrong with it, and make room for
        the checkpoint of ``iteration`` completed rollouts."""
        self.finish()
        error: Exception | None = None
        if distributed.rank() == 0:
            try:
                checkpoints.prepare_staging(self._directory, iteration, self._entries)
            except OSError as caught:
                error = self._unwritten(iteration, str(caught))
        distributed.raise_together(error, _what(iteration))

    def in_background(self, *, force_sync: bool) -> bool:
        """Whether ``write`` is to return before the checkpoint is written (--async-save)."""
        return self._config.async_save and not force_sync

    def write(
        self,
        iteration: int,
        write_parts: Callable[[Path], None],
        metadata: Mapping[str, Any],
        *,
        background: bool,
    ) -> None:
        """Let ``write_parts`` of every rank fill the staging directory, then publish it.

        Any failure is raised on every rank, from here or, of a save in the background, from the
        next ``prepare`` or ``finish``; older checkpoints and the tracker stay as they were.
        """
        if background:
            self.in_flight = self._thread.submit(self._write, iteration, write_parts, metadata)
        else:
            self._write(iteration, write_parts, metadata)

    def finish(self) -> None:
        """Wait for the save in the background; raise its error."""
        pending, self.in_flight = self.in_flight, None
        if pending is not None:
            pending.result()

    @property
    def _directory(self) -> str:
        assert self._config.save is not None, "--save"
        return self._config.save

    def _unwritten(self, iteration: int, reason: str) -> OSError:
        free = places.free_space(self._directory)
        room = "a step needs room beside those that are kept"
        return OSError(f"{_what(iteration)}: {reason}; {room}, and {free}")

    def _write(
        self, iteration: int, write_parts: Callable[[Path], None], metadata: Mapping[str, Any]
    ) -> None:
        staging = checkpoints.staging_dir(self._directory, iteration)
        self._together(lambda: write_parts(staging), iteration)

        def publish() -> None:
            if distributed.rank() == 0:
                described = {**metadata, checkpoints.MODEL: self._model}
                checkpoints.publish(self._directory, iteration, described)
                checkpoints.prune(self._directory, self._config.save_keep)

        self._together(publish, iteration)
        if distributed.rank() == 0:
            log.info("saved %s", checkpoints.step_dir(self._directory, iteration))

    def _together(self, action: Callable[[], None], iteration: int) -> None:
        """Run on every rank; an error on any is raised on all, the attempt's files are removed."""
        error: Exception | None = None
        try:
            action()
        except CheckpointException as caught:  # not an ``Exception``
            error = self._unwritten(iteration, causes(caught))
        except (OSError, RuntimeError) as caught:
            error = self._unwritten(iteration, _reason(caught))
            error.__cause__ = caught
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        try:
            distributed.raise_together(error, _what(iteration), self.group)
        except Exception:
            if distributed.rank() == 0:
                checkpoints.discard_staging(self._directory, iteration)
            raise


def causes(error: BaseException) -> str:
    """What went wrong on which rank, without the tracebacks that DCP makes part of its message."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {_reason(cause)}"
        for rank, (cause, _) in error.failures.items()
    )


def _reason(error: BaseException) -> str:
    """PyTorch's writer has no word for a full disk: it asserts that it is where it should be."""
    text = str(error)
    if "unexpected pos" not in text:  # What cannot be read is told by the same file's checks.
        return text
    return f"PyTorch's writer was cut short, as by a full disk ({text})"


def derived_seed(seed: int, step: int, rank: int) -> int:
    """A seed for one rank at one step, unrelated to those of other ranks and steps."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _what(iteration: int) -> str:
    return f"checkpoint {iteration}"
