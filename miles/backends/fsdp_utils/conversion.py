"""A saved step of this backend as a Hugging Face directory, in one process, tensor by tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from transformers import AutoModelForCausalLM

from miles.backends.fsdp_utils.checkpoint import BACKEND, unreadable
from miles.backends.fsdp_utils.weights import Weight, dtypes_by_key, match_weights
from miles.backends.training_utils import checkpoints
from miles.backends.training_utils.conversion_check import (
    check_model,
    check_new_model,
    check_step,
)
from miles.backends.training_utils.hf_export import export_hf
from miles.backends.training_utils.hf_files import checkpoint_dtypes
from miles.config.errors import ConfigError, Problem
from miles.contracts.types import NamedTensor
from miles.core import hf


def fsdp_to_hf(load: str, hf_checkpoint: str, save: str, unknown: Sequence[str] = ()) -> None:
    """Write the newest step of the checkpoint ``load`` as the Hugging Face directory ``save``.

    Names and side files are those of ``hf_checkpoint``; dtypes those in which the run sent its
    weights. Raises ``ConfigError``, also for ``unknown`` arguments, ``CheckpointDirError``, or
    ``OSError`` when writing fails.
    """
    problems = [
        *_unknown(unknown),
        *check_model(hf_checkpoint),
        *check_step(load, BACKEND, hf_checkpoint),
        *check_new_model(save, load, hf_checkpoint),
    ]
    if problems:
        raise ConfigError(problems)
    step = checkpoints.resolve_load(load, announce=False)
    assert step is not None, "checked"
    metadata = checkpoints.read_metadata(step)
    with torch.device("meta"):
        config = hf.load_config(hf_checkpoint)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    weights = match_weights(model, checkpoint_dtypes(hf_checkpoint), hf_checkpoint)
    folder = step / "model"
    stored = _stored_shapes(step, folder)
    wanted = {weight.key: model.state_dict()[weight.key].shape for weight in weights}
    wrong = sorted(key for key in stored | wanted if stored.get(key) != wanted.get(key))
    if wrong:
        remedy = f"{folder} is not of the model in {hf_checkpoint}: {', '.join(wrong[:3])}"
        raise ConfigError([Problem("--load", load, remedy)])
    sent = {name: getattr(torch, dtype) for name, dtype in metadata["dtypes"].items()}
    weights = [replace(weight, dtype=sent.get(weight.name, weight.dtype)) for weight in weights]
    export_hf(save, hf_checkpoint, weights, _stream(step, folder, weights))


def _unknown(words: Sequence[str]) -> list[Problem]:
    return (
        [Problem(" ".join(words), "", "is no argument of this tool; see --help")] if words else []
    )


def _stored_shapes(step: Path, folder: Path) -> dict[str, torch.Size]:
    try:
        held = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged index, a pickle, may raise anything
        raise unreadable(step, folder, error) from error
    return {key: item.size for key, item in held.items() if isinstance(item, TensorStorageMetadata)}


def _stream(step: Path, folder: Path, weights: Sequence[Weight]) -> Iterator[NamedTensor]:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    dtypes = dtypes_by_key(weights)
    for key, group in groupby(weights, key=lambda weight: weight.key):
        held = stored[key]
        assert isinstance(held, TensorStorageMetadata)
        full = torch.empty(held.size, dtype=held.properties.dtype)
        try:
            dcp_load({key: full}, storage_reader=FileSystemReader(folder), no_dist=True)
        except CheckpointException as error:  # not an ``Exception``
            raise unreadable(step, folder, error) from error
        except Exception as error:  # a damaged pickle may raise anything
            raise unreadable(step, folder, error) from error
        full = full.to(dtypes[key])
        for weight in group:
            out = full if weight.part is None else weight.part.of(full).clone()
            yield NamedTensor(weight.name, out.to(weight.dtype))
