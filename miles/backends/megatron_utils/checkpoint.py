"""Checkpoints of this backend: a torch_dist directory, the random state of every rank, metadata.

``training_utils/checkpoint_writer.py`` puts them in place, ``sharded_state.py`` knows what is in
torch_dist.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from miles.backends.megatron_utils import random_state, sharded_state
from miles.backends.megatron_utils.optimizer_shards import ForeignState
from miles.backends.megatron_utils.sharded_state import TrainerState
from miles.backends.training_utils import checkpoints
from miles.backends.training_utils.checkpoint_writer import (
    CheckpointWriter,
    causes,
    derived_seed,
)
from miles.backends.training_utils.damage import damage_in, load_random_state
from miles.config.checkpoint import CheckpointConfig
from miles.config.errors import ConfigError, Problem
from miles.core import distributed, logging

BACKEND = "megatron"
_ENTRIES = ("*.distcp", ".metadata", ".metadata.tmp", "rng_*")
_TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
"""By this Megatron-LM knows the format; it looks into the same metadata.json and skips the rest."""

_FOREIGN = (
    "{step}: its master weights and moments are not those of its weights ({found}); its weights "
    "are whole: convert them with tools/convert_torch_dist_to_hf.py and start from them with a "
    "fresh optimizer (--hf-checkpoint, another --save and no --load)"
)

log = logging.get(__name__)


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
        self._validated = False
        self.writer = CheckpointWriter(config, hf_checkpoint, BACKEND, _ENTRIES, timeout_minutes)

    def find(self) -> Path | None:
        """See ``CheckpointWriter.find``."""
        return self.writer.find()

    def save(
        self, iteration: int, state: TrainerState, metadata: Mapping[str, Any], *, force_sync: bool
    ) -> None:
        """Write the checkpoint of ``iteration`` completed rollouts, in the background under
        ``--async-save`` unless ``force_sync``.

        First waits for a save still being written and raises what went wrong with it. Any failure
        is raised on every rank and leaves older checkpoints and the tracker as they were.
        """
        self.writer.prepare(iteration)
        background = self.writer.in_background(force_sync=force_sync)
        # Which rank writes what is the same in each save of a process.
        tensors = sharded_state.writable(
            sharded_state.collect(state, iteration), copied=background, validate=not self._validated
        )
        self._validated = True
        rng = random_state.get()

        def write_parts(staging: Path) -> None:
            sharded_state.write(staging, tensors, self.writer.group)
            save_file(rng, staging / _rng_file())

        described = {**metadata, **_described(state)}
        self.writer.write(iteration, write_parts, described, background=background)

    def finish(self) -> None:
        """Wait for the save in the background; raise its error."""
        self.writer.finish()

    def load(self, step: Path, state: TrainerState) -> dict[str, Any]:
        """Fill ``state`` as far as the step holds it, set this rank's random state, and return the
        metadata. The layout of ranks may differ from the one that saved.

        An optimizer that the step lacks starts afresh from the weights, which is logged. Raises
        ``ConfigError`` on a rank that finds something wrong and an error that quotes it elsewhere.
        """
        metadata = checkpoints.read_metadata(step)
        _check_optimizer(step, metadata, state)
        held = _held(step, metadata, state)
        _read_together(step, held)
        if held.optimizer is None and state.optimizer is not None:
            # Main parameters are copies of the model's, made before these were read.
            state.optimizer.reload_model_params()
        if held.optimizer is not None:
            sharded_state.share_parameters(state.chunks)
        if not checkpoints.is_weights_only(step):
            self._restore_rng(step, metadata, state.args)
        return metadata

    def has(self, step: Path, part: str) -> bool:
        """Whether the step holds ``"optimizer"`` or ``"ref"``."""
        return part in _parts(checkpoints.read_metadata(step))

    def _restore_rng(self, step: Path, metadata: Mapping[str, Any], args: Namespace) -> None:
        if metadata["layout"] == _layout(args):
            random_state.restore(load_random_state(step, step / _rng_file()))
            return
        # As at the start of a run, ranks that hold the same parameters draw the same numbers.
        fresh = derived_seed(self._seed, metadata["iteration"], 0)
        random_state.seed(fresh, args)
        log.info(
            "checkpoint of layout %s on %s: random state seeded from (seed %d, step %d)",
            metadata["layout"],
            _layout(args),
            self._seed,
            metadata["iteration"],
        )


def find_weights(flag: str, directory: str) -> Path | None:
    """The step of a torch_dist directory whose weights ``flag`` wants; ``None`` if it is a Hugging
    Face directory. Collective; raises ``ConfigError`` on rank 0 and quotes it elsewhere."""
    step: Path | None = None
    error: Exception | None = None
    if distributed.rank() == 0:
        try:
            step = _weights_step(directory)
        except OSError as caught:
            error = caught
        except ConfigError as caught:
            error = ConfigError([dataclasses.replace(p, flag=flag) for p in caught.problems])
    distributed.raise_together(error, flag)
    return distributed.broadcast_object(step)


def load_weights(step: Path, state: TrainerState, flag: str = "--load") -> None:
    """Read the model's weights alone, whatever else the step holds. Collective.

    An optimizer in ``state`` takes them over. Raises as ``Checkpointer.load``, about ``flag``.
    """
    _read_together(step, TrainerState(args=state.args, chunks=state.chunks), flag)
    if state.optimizer is not None:
        state.optimizer.reload_model_params()


def save_weights(directory: str, state: TrainerState, source: str) -> None:
    """Write weights converted from the Hugging Face directory ``source``: a run that is given them
    as ``--load`` or ``--ref-load`` starts at rollout 0 with its own optimizer. Collective.
    ``state`` holds nothing but the model.

    What a failed attempt left is removed; without a tracker the directory is not a checkpoint.
    """
    timeout_minutes = state.args.distributed_timeout_minutes
    config = CheckpointConfig(save=directory)
    writer = CheckpointWriter(config, source, BACKEND, _ENTRIES, timeout_minutes)
    writer.prepare(0)
    tensors = sharded_state.writable(sharded_state.collect(state, 0), copied=False, validate=True)
    described = {"source": source, **_described(state), **checkpoints.WEIGHTS_ONLY}
    writer.write(
        0,
        lambda staging: sharded_state.write(staging, tensors, writer.group),
        described,
        background=False,
    )


def _read_together(step: Path, state: TrainerState, flag: str = "--load") -> None:
    error: Exception | None = None
    try:
        sharded_state.read(step, state)
    except sharded_state.Misfit as caught:
        error = _refused(flag, step, f"{step} does not fit this model: {caught}", caught)
    except CheckpointException as caught:  # not an ``Exception``
        # Megatron compares the shapes before anything is read, with an error of its own kind.
        faults = [f for f, _ in caught.failures.values() if isinstance(f, CheckpointingException)]
        shapes = "; ".join(dict.fromkeys(map(str, faults)))
        misfit = f"{step} does not fit this model: {shapes}"
        error = _refused(flag, step, misfit if faults else _unreadable(step, caught), caught)
    except ForeignState as caught:
        error = _refused(flag, step, _FOREIGN.format(step=step, found=caught), caught)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = _refused(flag, step, _unreadable(step, caught), caught)
    distributed.raise_together(error, f"reading {step}")


def _refused(flag: str, step: Path, remedy: str, cause: BaseException) -> ConfigError:
    refusal = ConfigError([Problem(flag, str(step.parent), remedy)])
    refusal.__cause__ = cause
    return refusal


def _unreadable(step: Path, error: BaseException) -> str:
    """What went wrong while reading, and the damaged file if that is why."""
    damage = damage_in(step, step)
    if damage is not None:
        return damage
    number = checkpoints.read_metadata(step)["iteration"]
    return (
        f"step {number}: {step} cannot be read into this model ({causes(error)}); if it is of "
        "another model than --hf-checkpoint, give that one"
    )


def _held(step: Path, metadata: Mapping[str, Any], state: TrainerState) -> TrainerState:
    """Those parts of the state that the step holds; says which it does not."""
    if checkpoints.is_weights_only(step):
        log.info("%s holds weights alone: first start, with a fresh optimizer", step)
        return TrainerState(args=state.args, chunks=state.chunks)
    parts = _parts(metadata)
    missing = {
        name: None
        for name in ("optimizer", "ref")
        if getattr(state, name) is not None and name not in parts
    }
    for name in missing:
        log.warning("%s has no %s: it starts afresh", step, name)
    return dataclasses.replace(state, **missing)


def _check_optimizer(step: Path, metadata: Mapping[str, Any], state: TrainerState) -> None:
    if state.optimizer is None or "optimizer" not in _parts(metadata):
        return
    saved = metadata["distributed_optimizer"]
    if saved != state.args.use_distributed_optimizer:
        word = "with" if saved else "without"
        remedy = (
            f"{step} was saved {word} it; its weights are whole: convert them with "
            "tools/convert_torch_dist_to_hf.py and start from them (--hf-checkpoint)"
        )
        raise ConfigError([Problem("--use-distributed-optimizer", str(not saved), remedy)])


def _described(state: TrainerState) -> dict[str, Any]:
    parts = {"optimizer": state.optimizer, "ref": state.ref}
    return {
        **_TORCH_DIST,
        "backend": BACKEND,
        "parts": ["model", *(name for name, part in parts.items() if part is not None)],
        "layout": _layout(state.args),
        "distributed_optimizer": bool(state.args.use_distributed_optimizer),
    }


def _parts(metadata: Mapping[str, Any]) -> list[str]:
    return metadata.get("parts", ["model"])


def _layout(args: Namespace) -> dict[str, int]:
    return {
        "world_size": distributed.world_size(),
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size,
    }


def _rng_file() -> str:
    return f"rng_{distributed.rank():05d}.safetensors"


def _weights_step(directory: str) -> Path | None:
    folder = Path(directory)
    if (folder / "config.json").is_file() and not (folder / checkpoints.TRACKER).exists():
        return None
    step = checkpoints.resolve_load(directory, announce=False)
    if step is None:
        remedy = "is neither a Hugging Face directory nor one that tools/convert_* wrote"
        raise ConfigError([Problem("--load", directory, remedy)])
    checkpoints.check_backend(step, checkpoints.verify(step), BACKEND)
    return step
