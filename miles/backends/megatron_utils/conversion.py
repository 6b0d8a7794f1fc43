"""Whole checkpoints offline, between Hugging Face directories and torch_dist, in any layout of
ranks; ``tools/convert_*.py`` are the command lines.
"""

import argparse
import math
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from miles.backends.megatron_utils import cpu_platform

# Megatron binds functions of torch while it is imported.
cpu_platform.install()

from miles.backends.megatron_utils import arguments, checkpoint  # noqa: E402
from miles.backends.megatron_utils.bridge import Spec, converter_of  # noqa: E402
from miles.backends.megatron_utils.chunks import build_chunks  # noqa: E402
from miles.backends.megatron_utils.converters import Converter  # noqa: E402
from miles.backends.megatron_utils.initialize import destroy, initialize  # noqa: E402
from miles.backends.megatron_utils.sharded_state import TrainerState  # noqa: E402
from miles.backends.megatron_utils.weights import exported, load_hf, stream_hf  # noqa: E402
from miles.backends.training_utils import checkpoints  # noqa: E402
from miles.backends.training_utils.conversion_check import (  # noqa: E402
    check_model,
    check_new_checkpoint,
    check_new_model,
    check_step,
)
from miles.backends.training_utils.hf_export import export_hf  # noqa: E402
from miles.backends.training_utils.hf_files import HFFiles  # noqa: E402
from miles.config.checkpoint import CheckpointConfig  # noqa: E402
from miles.config.cluster import ClusterConfig  # noqa: E402
from miles.config.command_line import CommandLine, Foreign, read_command_line  # noqa: E402
from miles.config.errors import ConfigError, Problem  # noqa: E402
from miles.config.precision import PrecisionConfig  # noqa: E402
from miles.config.rollout import RolloutConfig  # noqa: E402
from miles.config.root import MilesConfig  # noqa: E402
from miles.config.rules.problems import problem  # noqa: E402
from miles.contracts.types import NamedTensor  # noqa: E402
from miles.core import distributed, hf, logging  # noqa: E402

log = logging.get(__name__)

_LAYOUT = frozenset(
    f"--{name}"
    for name in (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
    )
)


def hf_to_torch_dist(hf_checkpoint: str, save: str, megatron_flags: Sequence[str]) -> None:
    """Write the weights of a Hugging Face directory as the torch_dist checkpoint ``save``, from
    which a run starts at rollout 0. Collective over torchrun's ranks, or one process alone.

    Raises ``ConfigError``, ``CheckpointDirError``, or ``OSError`` when writing fails; nothing that
    could be loaded is then there.
    """
    problems = check_new_checkpoint(save, hf_checkpoint)
    config = _config(hf_checkpoint, CheckpointConfig(save=save), megatron_flags, problems)
    with _joined(config) as args:
        state = TrainerState(args=args, chunks=build_chunks(args, trainable=False))
        load_hf(state.chunks, _converter(hf_checkpoint, args.spec), hf_checkpoint)
        checkpoint.save_weights(save, state, hf_checkpoint)


def torch_dist_to_hf(
    load: str, hf_checkpoint: str, save: str, megatron_flags: Sequence[str]
) -> None:
    """Write the newest step of the torch_dist checkpoint ``load`` as the Hugging Face directory
    ``save``, whose names, dtypes and side files are those of ``hf_checkpoint``.

    Collective over torchrun's ranks, or one process alone. Tensors that are not trained (vision)
    are copied. Raises as ``hf_to_torch_dist``.
    """
    problems = [
        *check_step(load, checkpoint.BACKEND, hf_checkpoint),
        *check_new_model(save, load, hf_checkpoint),
    ]
    config = _config(hf_checkpoint, CheckpointConfig(load=load), megatron_flags, problems)
    step = checkpoints.resolve_load(load, announce=False)
    assert step is not None, "checked"
    files = HFFiles(hf_checkpoint)
    with _joined(config) as args:
        converter = _converter(hf_checkpoint, args.spec)
        state = TrainerState(args=args, chunks=build_chunks(args, trainable=False))
        checkpoint.load_weights(step, state)
        others = [name for name in files.headers if name.startswith(converter.not_trained)]
        tensors = [*exported(converter, files), *(files.headers[name] for name in others)]

        def stream() -> Iterator[NamedTensor]:
            yield from stream_hf(state.chunks, converter, files)
            yield from (NamedTensor(name, files.read(name)) for name in others)

        export_hf(save, hf_checkpoint, tensors, stream())


def _converter(hf_checkpoint: str, spec: Spec) -> Converter:
    try:
        return converter_of(hf.load_config(hf_checkpoint), spec)
    except ValueError as error:
        raise ConfigError([Problem("--hf-checkpoint", hf_checkpoint, str(error))]) from error


def _config(
    hf_checkpoint: str,
    checkpoint_config: CheckpointConfig,
    megatron_flags: Sequence[str],
    problems: Sequence[Problem],
) -> MilesConfig:
    """The config of a trainer that would have this model and layout. Raises ``ConfigError`` with
    the ``problems`` of the directories and all others."""
    unusable = check_model(hf_checkpoint)
    misplaced, flags = _misplaced(read_command_line(megatron_flags))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = MilesConfig(
        cluster=ClusterConfig(train_backend="megatron", actor_num_gpus_per_node=num_ranks),
        rollout=RolloutConfig(hf_checkpoint=None if unusable else hf_checkpoint),
        checkpoint=checkpoint_config,
        precision=PrecisionConfig() if unusable else _precision(hf_checkpoint),
    )
    layout = [] if unusable else _layout(hf_checkpoint, flags, num_ranks)
    argv, found, messages = arguments.check(config, [*flags, *layout])
    if unusable or problems or misplaced or found:
        raise ConfigError([*unusable, *problems, *misplaced, *found])
    if int(os.environ.get("RANK", "0")) == 0:
        for message in messages:
            log.log(message.level, "%s", message.text)
    # What is drawn at random would be overwritten.
    return replace(config, megatron_argv=(*argv, "--no-initialization"))


def _misplaced(line: CommandLine) -> tuple[list[Problem], list[Foreign]]:
    """The problem of each flag that is not of Megatron's model or layout; the flags that are."""
    remedy = "is no flag of Megatron's model or layout, which is all that a conversion takes"
    problems = {
        (found := problem(line.config, dest, remedy=remedy)).flag: found for dest in line.given
    }
    for unread in line.problems:
        # Of a value that cannot be read the config has the default.
        found = problems.get(unread.flag)
        problems[unread.flag] = unread if found is None else replace(found, value=unread.value)
    remedy = "the checkpoint says the precision, which a conversion keeps; leave it out"
    precision = [flag for flag in line.foreign if flag.name == "--bf16"]
    problems |= {flag.name: Problem(flag.name, flag.value, remedy) for flag in precision}
    others = [flag for flag in line.foreign if flag not in precision]
    return [problems[name] for name in sorted(problems)], others


def _precision(hf_checkpoint: str) -> PrecisionConfig:
    """A dtype that holds all tensors exactly."""
    dtypes = {header.dtype for header in HFFiles(hf_checkpoint).headers.values()}
    fp16 = dtypes == {torch.float16}
    return PrecisionConfig(fp16=fp16, fp32=not fp16 and dtypes != {torch.bfloat16})


def _layout(hf_checkpoint: str, given: Sequence[Foreign], num_ranks: int) -> list[Foreign]:
    """Without a layout, layers and then experts are spread over the ranks as far as they divide."""
    if num_ranks == 1 or any(flag.name in _LAYOUT for flag in given):
        return []
    text_config = hf.load_config(hf_checkpoint).get_text_config()
    stages = math.gcd(text_config.num_hidden_layers, num_ranks)
    sizes = {"pipeline-model-parallel-size": stages}
    # Under the name that transformers' classes share; in config.json it is spelled otherwise.
    num_experts = getattr(text_config, "num_experts", None)
    if num_experts:
        sizes["expert-model-parallel-size"] = math.gcd(num_experts, num_ranks // stages)
    return [Foreign(name=f"--{name}", words=(str(size),)) for name, size in sizes.items()]


@contextmanager
def _joined(config: MilesConfig) -> Generator[argparse.Namespace]:
    """Megatron's arguments, with its process groups."""
    with _environment():
        distributed.init_process_group(config.cluster.distributed_timeout_minutes)
        try:
            yield initialize(config)
        finally:
            destroy()
            distributed.destroy_process_group()


@contextmanager
def _environment() -> Generator[None]:
    """torchrun's variables for a process that it did not start."""
    if "RANK" in os.environ:
        yield
        return
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(distributed.host_rendezvous("127.0.0.1")),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.update(alone)
    try:
        yield
    finally:
        for name in alone:
            del os.environ[name]
