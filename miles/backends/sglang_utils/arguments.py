"""SGLang's side of the command line: ``--sglang-*`` and ``--router-*`` as it reads them, and the
arguments of its servers.

The other modules of this name declare flags or adapt a parser; here flags pass through.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles.backends.sglang_utils import nccl, package, refusals, surface
from miles.backends.sglang_utils.surface import (
    ROUTER_PREFIX,
    SERVER_PREFIX,
    Loader,
    SurfaceError,
)
from miles.config.command_line import Foreign, unknown_flag
from miles.config.derived import needs_engines
from miles.config.errors import ConfigError, Problem
from miles.config.flags import flag_specs
from miles.config.messages import Message, note, warning
from miles.config.root import MilesConfig
from miles.config.rules.problems import Given
from miles.core import hf

DEFAULT_MAX_RUNNING_REQUESTS = 256
CPU_MEMORY_SHARE = 0.8
"""Of the host's available memory, for weights and key/value cache of all engines together."""
CPU_CACHE_TOKENS = 65_536
"""Most tokens in the key/value cache of an engine on the host, which the trainer shares."""
MAX_COLOCATED_MEMORY = 0.8
"""``--mem-fraction-static`` that leaves room for a trainer on the same device: its default."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What becomes of the flags."""

    sglang_argv: tuple[str, ...] = ()
    """Under the names of ``sglang.launch_server``."""
    router_argv: tuple[str, ...] = ()
    """Under the names of ``sglang_router.launch_router``."""
    problems: Sequence[Problem] = ()
    messages: Sequence[Message] = ()


def is_ours(flag: Foreign) -> bool:
    """Whether a flag that Miles does not declare is meant for SGLang."""
    return flag.name.startswith((SERVER_PREFIX, ROUTER_PREFIX))


def check(config: MilesConfig, given: Given, foreign: Sequence[Foreign]) -> Checked:
    """Read the prefixed flags as SGLang does. Imports SGLang (seconds) only where there are any
    for it."""
    if not needs_engines(config):
        return Checked(problems=refusals.without_engines(config, foreign))
    engine, reason = package.choose_engine(config)
    if engine != "sglang":
        problems = refusals.of_the_embedded_engine(config, given, foreign, reason)
        return Checked(problems=[*problems, *nccl.check(config, ())])
    messages = _warnings(config)
    if package.problem() is not None:
        return Checked()  # ``rules.check`` has it.
    for_router = _with_prefix(foreign, ROUTER_PREFIX)
    for_server = _with_prefix(foreign, SERVER_PREFIX)
    if config.rollout.rollout_external and for_server:
        remedy = (
            "the engines of --rollout-external were launched with flags of their own; leave it out"
        )
        return Checked(problems=[Problem(flag.name, flag.value, remedy) for flag in for_server])
    if config.rollout.sglang_router_ip is not None:
        remedy = (
            "the router of --sglang-router-ip runs already, with flags of its own; leave it out"
        )
        problems = [Problem(flag.name, flag.value, remedy) for flag in for_router]
        if problems:
            return Checked(problems=problems)
    try:
        server = _read(config, for_server, surface.server)
        router = _read(config, for_router, surface.router)
    except SurfaceError as error:
        remedy = f"the installed sglang {package.version()} cannot be imported: {error}"
        return Checked(problems=[Problem("--rollout-engine", "sglang", remedy)])
    problems = [*server.problems, *router.problems, *nccl.check(config, server.argv)]
    if not problems and server.argv:
        args = surface.server().read(server.argv)
        problems = [*_parallel_sizes(config, args), *_unchecked_layout(config, args)]
    return Checked(
        sglang_argv=server.argv,
        router_argv=router.argv,
        problems=problems,
        messages=[*messages, *server.messages],
    )


def server_help() -> str:
    """The flags of SGLang's server. Raises ``ConfigError`` where it cannot be imported."""
    return _help(
        surface.server,
        usage="python train.py --rollout-engine sglang ... [SGLANG FLAGS]",
        description="The flags of `python -m sglang.launch_server`, under --sglang-, but for those "
        "that Miles sets or declares itself (--help).",
        refused=refusals.SERVER,
    )


def router_help() -> str:
    """The flags of SGLang's router. Raises ``ConfigError`` where it cannot be imported."""
    return _help(
        surface.router,
        usage="python train.py --rollout-engine sglang ... [ROUTER FLAGS]",
        description="The flags of `python -m sglang_router.launch_router`, under --router-.",
        refused=refusals.ROUTER,
    )


def server_arguments(config: MilesConfig, index: int, num_engines: int) -> list[str]:
    """Arguments of the server at ``index`` of the job's ``num_engines``, without host and port.

    A user's own come last: of an option that stands there twice, SGLang takes the second.
    """
    rollout = config.rollout
    options: dict[str, object | None] = {
        "--model-path": rollout.hf_checkpoint,
        "--tp-size": config.cluster.rollout_num_gpus_per_engine,
        "--dtype": engine_dtype(config),
        "--log-level": rollout.sglang_log_level.lower(),
        "--context-length": rollout.sglang_context_length,
        "--max-running-requests": rollout.sglang_max_running_requests,
        "--max-total-tokens": rollout.sglang_max_total_tokens,
        "--mem-fraction-static": rollout.sglang_mem_fraction_static,
        "--random-seed": config.data.rollout_seed + index,
    }
    where = machine_arguments(config, num_engines)
    return [
        *_given(options),
        "--trust-remote-code",
        "--skip-server-warmup",
        *where,
        *config.sglang_argv,
    ]


def machine_arguments(config: MilesConfig, num_engines: int) -> list[str]:
    """What follows from the devices: the host's own, or an accelerator that the trainer shares."""
    if not package.has_accelerator():
        return cpu_arguments(config, num_engines)
    return colocated_arguments(config) if config.cluster.colocate else []


def cpu_arguments(config: MilesConfig, num_engines: int) -> list[str]:
    """What SGLang needs to run on the host, through ``miles_plugins/sglang_cpu``."""
    rollout = config.rollout
    options: dict[str, object | None] = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
    }
    if rollout.sglang_mem_fraction_static is None:
        options["--mem-fraction-static"] = round(CPU_MEMORY_SHARE / num_engines, 3)
    if rollout.sglang_max_total_tokens is None:
        tokens = max(CPU_CACHE_TOKENS, rollout.sglang_context_length or 0)
        options["--max-total-tokens"] = tokens
    if rollout.sglang_max_running_requests is None:
        options["--max-running-requests"] = DEFAULT_MAX_RUNNING_REQUESTS
    return [*_given(options), "--sleep-on-idle"]


def colocated_arguments(config: MilesConfig) -> list[str]:
    """What lets SGLang share an accelerator with the trainer."""
    options: dict[str, object | None] = {}
    if config.rollout.sglang_mem_fraction_static is None:
        options["--mem-fraction-static"] = MAX_COLOCATED_MEMORY
    # Its graphs of prefills ask for multicast memory, which the trainer's reservation leaves none
    # of. A user's --cuda-graph-config would lose against the flag of one phase.
    if not any(word.startswith("--cuda-graph-config") for word in config.sglang_argv):
        options["--cuda-graph-backend-prefill"] = "disabled"
    saver = ["--enable-memory-saver"] if config.offload.offload_rollout else []
    return [*_given(options), *saver]


def router_arguments(config: MilesConfig) -> list[str]:
    """Arguments of the router, without host and port; a user's own come last and win.

    Its own health checks are off: it would leave out engines that a weight update pauses, or that
    are asleep while the trainer has the device. The job watches its engines itself.
    """
    levels = {"warning": "warn", "critical": "error"}
    level = config.rollout.sglang_log_level.lower()
    options: dict[str, object | None] = {
        "--request-timeout-secs": math.ceil(config.rollout.rollout_request_timeout_s),
        "--log-level": levels.get(level, level),
    }
    return [*_given(options), "--disable-health-check", *config.router_argv]


@dataclass(frozen=True, kw_only=True)
class _Argv:
    argv: tuple[str, ...] = ()
    problems: Sequence[Problem] = ()
    messages: Sequence[Message] = ()


def _with_prefix(foreign: Sequence[Foreign], prefix: str) -> list[Foreign]:
    return [flag for flag in foreign if flag.name.startswith(prefix)]


def _read(config: MilesConfig, flags: Sequence[Foreign], load: Loader) -> _Argv:
    """One owner's flags as its own words, and everything wrong with them."""
    if not flags:
        return _Argv()
    owner = load()
    known = owner.names
    refused = refusals.SERVER if owner.prefix == SERVER_PREFIX else refusals.ROUTER
    argv: list[str] = []
    problems: list[Problem] = []
    messages: list[Message] = []
    for flag in flags:
        reason = refused.get(known.get(flag.name, ""))
        rename = _rename(flag, known)
        if reason is not None:
            problems.append(Problem(flag.name, flag.value, f"leave it out: {reason}"))
        elif rename is not None:
            words = [f"--{rename.option}", rename.value(config)]
            argv += words
            text = f"{flag.name}: SGLang {package.version()} has no such flag; passed on as "
            messages.append(note(text + " ".join(words)))
        elif flag.name not in known:
            hints = [name for name, first in known.items() if first not in refused]
            problems.append(unknown_flag(flag, hints))
        elif (fault := owner.fault(owner.words(flag))) is not None:
            problems.append(Problem(flag.name, flag.value, fault))
        else:
            argv += owner.words(flag)
    return _Argv(argv=tuple(argv), problems=problems, messages=messages)


def _rename(flag: Foreign, known: Mapping[str, str]) -> refusals.Rename | None:
    """Only for a switch as it was: without a value."""
    if flag.name in known or flag.words or not flag.name.startswith(SERVER_PREFIX):
        return None
    return refusals.RENAMES.get(flag.name.removeprefix(SERVER_PREFIX))


def _parallel_sizes(config: MilesConfig, args: argparse.Namespace) -> list[Problem]:
    """The ways to divide a model or its requests that an engine's GPUs allow: SGLang says no more
    than the line of its assertion."""
    gpus = config.cluster.rollout_num_gpus_per_engine
    problems: list[Problem] = []
    if args.dp_size > 1 and not args.enable_dp_attention:
        remedy = (
            "without --sglang-enable-dp-attention every replica needs GPUs of its own; add that, "
            "or start more engines (--rollout-num-gpus)"
        )
        problems.append(Problem("--sglang-dp-size", args.dp_size, remedy))
    for flag, size in (("--sglang-dp-size", args.dp_size), ("--sglang-ep-size", args.ep_size)):
        if size < 1 or gpus % size != 0:
            remedy = f"must divide --rollout-num-gpus-per-engine = {gpus}"
            problems.append(Problem(flag, size, remedy))
    return problems


def _unchecked_layout(config: MilesConfig, args: argparse.Namespace) -> list[Problem]:
    """What each rank of an engine holds is known of tensor parallelism alone."""
    if not config.weight_sync.check_weight_update_equal:
        return []
    layouts = (
        ("--sglang-ep-size", args.ep_size, args.ep_size > 1),
        ("--sglang-pp-size", args.pp_size, args.pp_size > 1),
        ("--sglang-enable-dp-attention", True, args.enable_dp_attention),
    )
    remedy = (
        "--check-weight-update-equal knows what each rank of an engine holds under tensor "
        "parallelism alone; leave one of the two out"
    )
    return [Problem(flag, value, remedy) for flag, value, used in layouts if used]


def _warnings(config: MilesConfig) -> list[Message]:
    share = config.rollout.sglang_mem_fraction_static
    if share is None or share <= MAX_COLOCATED_MEMORY or not config.cluster.colocate:
        return []
    text = (
        f"--sglang-mem-fraction-static {share:g}: with --colocate the trainer keeps memory of the "
        f"same device, so the engine may not fit; {MAX_COLOCATED_MEMORY:g} or less is usual"
    )
    return [warning(text)]


def _help(load: Loader, *, usage: str, description: str, refused: Mapping[str, str]) -> str:
    if not package.is_installed():
        raise ConfigError([Problem("--rollout-engine", "sglang", package.missing())])
    try:
        owner = load()
    except SurfaceError as error:
        remedy = f"the installed sglang {package.version()} cannot be imported: {error}"
        raise ConfigError([Problem("--rollout-engine", "sglang", remedy)]) from error
    ours = {option for spec in flag_specs(MilesConfig) for option in spec.options}
    hidden = {name for name, first in owner.names.items() if name in ours or first in refused}
    return owner.help_text(usage, description, hidden)


def _given(options: Mapping[str, object | None]) -> list[str]:
    return [str(word) for pair in options.items() if pair[1] is not None for word in pair]


def engine_dtype(config: MilesConfig) -> str:
    """Of a job's engines: float16 under ``--fp16``, else the checkpoint's. SGLang's own default
    makes float16 of float32."""
    if config.rollout.sglang_dtype != "auto":
        return config.rollout.sglang_dtype
    return "float16" if config.precision.fp16 else hf.dtype_name(str(config.rollout.hf_checkpoint))
