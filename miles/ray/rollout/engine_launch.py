"""How the engine servers of a job are started: which kind, and the command line of each."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.backends.sglang_utils.arguments import (
    machine_arguments,
    router_arguments,
    server_arguments,
)
from miles.backends.sglang_utils.package import choose_engine
from miles.config.root import MilesConfig
from miles.core import device, logging
from miles.ray.errors import JobError
from miles.ray.placement import Placement

logger = logging.get(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineLaunch:
    """How to start one server: an engine's, or the router's."""

    command: tuple[str, ...]
    """Without ``--ready-file`` and ``--parent-pid``, which the holder adds and every server of ours
    takes."""
    environment: Mapping[str, str]
    log_file: str


Launcher = Callable[[MilesConfig, int, Path], EngineLaunch]
"""The launch of the engine at a position, with its log file."""


def embedded_launch(config: MilesConfig, index: int, log_file: Path) -> EngineLaunch:
    """The embedded server for this job's flags."""
    rollout = config.rollout
    arguments: dict[str, object] = {
        "--model-path": rollout.hf_checkpoint,
        "--dtype": _embedded_dtype(config),
        "--log-level": rollout.sglang_log_level.lower(),
        "--context-length": rollout.sglang_context_length,
        "--max-running-requests": rollout.sglang_max_running_requests,
        "--max-total-tokens": rollout.sglang_max_total_tokens,
    }
    pairs = [str(x) for k, v in arguments.items() if v is not None for x in (k, v)]
    return _launch("miles.backends.embedded.server", pairs, config, log_file)


def _embedded_dtype(config: MilesConfig) -> str:
    dtype = config.rollout.sglang_dtype
    return "float16" if dtype == "auto" and config.precision.fp16 else dtype


def sglang_launch(config: MilesConfig, index: int, log_file: Path) -> EngineLaunch:
    """Released SGLang for this job's flags."""
    arguments = server_arguments(config, index, num_engines(config))
    return _launch("miles.backends.sglang_utils.server", arguments, config, log_file)


def router_launch(config: MilesConfig, log_file: Path) -> EngineLaunch:
    """SGLang's router for this job's flags."""
    arguments = router_arguments(config)
    logger.info("the router of the engines runs with %s", " ".join(arguments))
    return _launch("miles.backends.sglang_utils.router", arguments, config, log_file)


LAUNCHERS: dict[str, Launcher] = {"embedded": embedded_launch, "sglang": sglang_launch}


def num_engines(config: MilesConfig) -> int:
    return (config.cluster.rollout_num_gpus or 1) // config.cluster.rollout_num_gpus_per_engine


def choose_launcher(config: MilesConfig, placement: Placement) -> Launcher:
    """The launcher that ``--rollout-engine`` stands for, said in the log.

    Raises ``JobError`` for a placement that it cannot serve.
    """
    kind, reason = choose_engine(config)
    if kind == "embedded":
        require_one_device(placement, config.cluster.rollout_num_gpus_per_engine)
    logger.info("--rollout-engine %s: %s (%s)", config.rollout.rollout_engine, kind, reason)
    if kind == "sglang":
        arguments = machine_arguments(config, num_engines(config))
        where = "on shared devices" if device.has_accelerator() else "without an accelerator"
        if arguments:
            logger.info("SGLang %s runs with %s", where, " ".join(arguments))
    return LAUNCHERS[kind]


def require_one_machine(placement: Placement, here: str) -> None:
    """Engine servers listen on loopback: all slots must be on the machine of the driver.

    Raises ``JobError``.
    """
    elsewhere = sorted({slot.node_ip for slot in placement.slots} - {here})
    if elsewhere:
        raise JobError(
            f"engines serve one machine alone, but of the reserved slots some are on "
            f"{', '.join(elsewhere)} and not on {here}: ask for no more slots than {here} has "
            "(--actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus)"
        )


def require_one_device(placement: Placement, gpus_per_engine: int) -> None:
    """The embedded server runs on one device. On a CPU an engine of several slots has their cores.

    Raises ``JobError``.
    """
    if gpus_per_engine > 1 and placement.on_gpu:
        raise JobError(
            f"--rollout-num-gpus-per-engine {gpus_per_engine}: the embedded engine is not split "
            "over several GPUs; leave it out, and --rollout-num-gpus says how many engines there "
            "are (with --colocate: one for each trainer rank)"
        )


def _launch(module: str, arguments: list[str], config: MilesConfig, log_file: Path) -> EngineLaunch:
    return EngineLaunch(
        command=(sys.executable, "-m", module, *arguments),
        environment={
            "TOKENIZERS_PARALLELISM": "false",
            **device.thread_environment(num_engines(config)),
        },
        log_file=str(log_file),
    )
