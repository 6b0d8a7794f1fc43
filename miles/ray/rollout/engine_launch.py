"""How the engine servers of a job are started: which kind, where, and the command line of each."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles.backends.sglang_utils.arguments import (
    machine_arguments,
    router_arguments,
    server_arguments,
)
from miles.backends.sglang_utils.nccl import nccl_environment
from miles.backends.sglang_utils.package import choose_engine
from miles.config.root import MilesConfig
from miles.core import device, device_environment, logging
from miles.ray.errors import JobError
from miles.ray.placement import Layout, Placement
from miles.ray.rollout.engine_holder import EngineLaunch

logger = logging.get(__name__)


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """One server process: a whole engine, or its part on one of several machines."""

    engine: int
    """Position of the engine among the job's."""
    host: str
    """The address where it listens."""
    device_ids: tuple[int, ...] = ()
    """Physical ids; empty without accelerators."""
    num_nodes: int = 1
    node_rank: int = 0
    head: str | None = None
    """``host:port`` where the parts of an engine of several machines meet."""


Launcher = Callable[[MilesConfig, EnginePart, Path], EngineLaunch]
"""The launch of a server, with its log file."""


def embedded_launch(config: MilesConfig, part: EnginePart, log_file: Path) -> EngineLaunch:
    """The embedded server for this job's flags."""
    rollout = config.rollout
    arguments: dict[str, object] = {
        "--model-path": rollout.hf_checkpoint,
        "--host": part.host,
        "--dtype": _embedded_dtype(config),
        "--log-level": rollout.sglang_log_level.lower(),
        "--context-length": rollout.sglang_context_length,
        "--max-running-requests": rollout.sglang_max_running_requests,
        "--max-total-tokens": rollout.sglang_max_total_tokens,
    }
    pairs = [str(x) for k, v in arguments.items() if v is not None for x in (k, v)]
    return _launch("miles.backends.embedded.server", pairs, config, log_file, part.device_ids)


def _embedded_dtype(config: MilesConfig) -> str:
    dtype = config.rollout.sglang_dtype
    return "float16" if dtype == "auto" and config.precision.fp16 else dtype


def sglang_launch(config: MilesConfig, part: EnginePart, log_file: Path) -> EngineLaunch:
    """Released SGLang for this job's flags."""
    arguments = [
        *server_arguments(config, part.engine, num_engines(config)),
        "--host",
        part.host,
    ]
    if part.head is not None:
        nodes = ("--nnodes", part.num_nodes, "--node-rank", part.node_rank)
        arguments += [*map(str, nodes), "--dist-init-addr", part.head]
    return _launch(
        "miles.backends.sglang_utils.server", arguments, config, log_file, part.device_ids
    )


def router_launch(config: MilesConfig, log_file: Path) -> EngineLaunch:
    """SGLang's router for this job's flags."""
    arguments = router_arguments(config)
    logger.info("the router of the engines runs with %s", " ".join(arguments))
    return _launch("miles.backends.sglang_utils.router", arguments, config, log_file)


LAUNCHERS: dict[str, Launcher] = {"embedded": embedded_launch, "sglang": sglang_launch}


def num_engines(config: MilesConfig) -> int:
    return (config.cluster.rollout_num_gpus or 1) // config.cluster.rollout_num_gpus_per_engine


def choose_launcher(config: MilesConfig, layout: Layout, placement: Placement) -> Launcher:
    """The launcher that ``--rollout-engine`` stands for, said in the log.

    Raises ``JobError`` for a placement that it cannot serve.
    """
    kind, reason = choose_engine(config)
    if kind == "embedded":
        require_one_process(layout, placement)
    if config.cluster.colocate and not (kind == "sglang" and placement.on_gpu):
        require_shared_memory(placement)
    logger.info("--rollout-engine %s: %s (%s)", config.rollout.rollout_engine, kind, reason)
    if kind == "sglang":
        arguments = machine_arguments(config, num_engines(config))
        where = "on shared devices" if device.has_accelerator() else "without an accelerator"
        if arguments:
            logger.info("SGLang %s runs with %s", where, " ".join(arguments))
    return LAUNCHERS[kind]


def require_shared_memory(placement: Placement) -> None:
    """Colocated engines that take weights through host memory are on the machine of the trainer's
    first rank, so all slots are.

    Raises ``JobError``.
    """
    machines = {slot.node_ip for slot in placement.slots}
    if len(machines) > 1:
        raise JobError(
            "--colocate: these engines take weights through host memory, which machines do not "
            f"share, but there are slots on several ({placement.describe()}); give the engines "
            "slots of their own (--rollout-num-gpus instead of --colocate), use SGLang on "
            "accelerators (--rollout-engine sglang), or ask for no more slots than one machine has"
        )


def require_one_process(layout: Layout, placement: Placement) -> None:
    """The embedded server is one process on one device. On a CPU an engine of several slots has
    their cores.

    Raises ``JobError``.
    """
    most = max(map(len, layout.engine_slots), default=1)
    machines = max((len(placement.by_machine(slots)) for slots in layout.engine_slots), default=1)
    if (most > 1 and placement.on_gpu) or machines > 1:
        raise JobError(
            f"--rollout-num-gpus-per-engine {most}: the embedded engine is not split over several "
            "GPUs or machines; leave it out, and --rollout-num-gpus says how many engines there "
            "are (with --colocate: one for each trainer rank)"
        )


def serves_on_loopback(config: MilesConfig, placement: Placement, here: str) -> bool:
    """Whether all who talk to the engines are on the driver's machine, ``here``: then no other can
    reach them, else they listen at the address of their machine."""
    return placement.is_all_on(here) and _is_local(config.rollout.sglang_router_ip, here)


def _is_local(router: str | None, here: str) -> bool:
    """Whether a router that runs already is on this machine, as far as its address says so."""
    if router is None or router in (here, "localhost"):
        return True
    try:
        return ipaddress.ip_address(router.strip("[]")).is_loopback
    except ValueError:  # A name.
        return False


def _launch(
    module: str,
    arguments: list[str],
    config: MilesConfig,
    log_file: Path,
    device_ids: tuple[int, ...] = (),
) -> EngineLaunch:
    return EngineLaunch(
        arguments=("-m", module, *arguments),
        environment={
            "TOKENIZERS_PARALLELISM": "false",
            **nccl_environment(config.sglang_argv),
            **device_environment.thread_environment(num_engines(config)),
        },
        log_file=str(log_file),
        start_timeout_s=config.rollout.rollout_engine_start_timeout_s,
        device_ids=device_ids,
    )
