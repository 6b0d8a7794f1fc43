"""Flags of SGLang's server and router that a user cannot give, each with the reason; the names that
a release has given up; and what all of them are without SGLang.

A flag that would work against the job around the engine is refused; what is not listed here is
SGLang's own business and passes. ``docs/sglang.md`` shows these tables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles.backends.sglang_utils import package
from miles.backends.sglang_utils.surface import ROUTER_PREFIX, SERVER_PREFIX
from miles.config.command_line import Foreign
from miles.config.derived import is_supervised
from miles.config.errors import Problem
from miles.config.flags import flag_specs
from miles.config.root import MilesConfig
from miles.config.rules.problems import Given, problem
from miles.config.values import did_you_mean

ONLY_SGLANG = ("sglang_mem_fraction_static", "sglang_router_ip", "sglang_router_port")
"""Our own flags that the embedded engine has no use for."""

_PLACES = "--rollout-num-gpus and --rollout-num-gpus-per-engine place the engines"
_GPUS = "an engine's GPUs are tensor-parallel ranks, --rollout-num-gpus-per-engine of them"
_ADDRESS = "Miles gives every server an address of its own"
_HTTP = "Miles speaks plain HTTP/1.1 with its engines"
_KEYS = "Miles sends no key; what it starts serves its own processes alone"
_WHOLE = "every engine of a job generates whole responses"
_SAMPLING = "sampling is that of the --rollout-... flags, which the trainer counts on"
_WEIGHTS = "the trainer's weight syncs set it"
UNQUANTIZED = (
    "a weight sync sends the checkpoint's own tensors, and SGLang quantizes only what it loads at "
    "its start"
)
_LORA = "LoRA is not supported in this version, which trains all weights"
_REGISTER = "engines are registered by the job that starts them"


def _table(rows: Mapping[str, str]) -> Mapping[str, str]:
    return {name: reason for names, reason in rows.items() for name in names.split()}


SERVER: Mapping[str, str] = _table(
    {
        "model-path": "--hf-checkpoint sets it",
        "tp-size": "--rollout-num-gpus-per-engine sets it",
        "pp-size": _GPUS,
        "base-gpu-id gpu-id-step nnodes node-rank dist-init-addr use-ray": _PLACES,
        "device": "the accelerator of the machine, or the CPU where there is none",
        "host port nccl-port": _ADDRESS,
        "random-seed": "--rollout-seed sets it, for each engine another one",
        "enable-memory-saver": "--offload-rollout (of --colocate) sets it",
        "weight-version": _WEIGHTS,
        "checkpoint-engine-wait-weights-before-ready": _WEIGHTS,
        "config": "a file of flags is --config FILE.yaml; these flags can stand in it",
        "smg-grpc-mode grpc-mode grpc-port enable-http2 fastapi-root-path": _HTTP,
        "ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password enable-ssl-refresh": _HTTP,
        "api-key admin-api-key": _KEYS,
        """disaggregation-mode encoder-only language-only is-embedding
        prefill-only-disable-kv-cache""": _WHOLE,
        "skip-tokenizer-init": "rewards and stop strings need the engine's text",
        "allow-auto-truncate": "--rollout-max-prompt-len leaves long prompts out, and says so",
        "preferred-sampling-params": _SAMPLING,
        "quantization torchao-config modelopt-quant quantize-and-serve": UNQUANTIZED,
        "enable-lora lora-paths": _LORA,
    }
)
"""By the first name that SGLang's parser has for an option, without dashes."""

ROUTER: Mapping[str, str] = _table(
    {
        "host port": f"{_ADDRESS}; a router of yours is --sglang-router-ip, --sglang-router-port",
        "worker-urls": _REGISTER,
        """service-discovery selector service-discovery-port service-discovery-namespace
        prefill-selector decode-selector""": _REGISTER,
        "pd-disaggregation prefill decode prefill-policy decode-policy mini-lb": _WHOLE,
        "backend enable-igw": "its workers are the SGLang engines of one job",
        "request-timeout-secs": "--rollout-request-timeout-s sets it",
        "tls-cert-path tls-key-path": _HTTP,
        "client-cert-path client-key-path ca-cert-paths": _HTTP,
        """api-key control-plane-api-keys jwt-issuer jwt-audience jwt-jwks-uri
        jwt-role-mapping""": _KEYS,
    }
)
"""Likewise, by the names of the router's parser."""


@dataclass(frozen=True)
class Rename:
    """What an option is called that a release has given up."""

    option: str
    """Without dashes."""
    value: Callable[[MilesConfig], str]


RENAMES: Mapping[str, Rename] = {
    "enable-ep-moe": Rename("ep-size", lambda c: str(c.cluster.rollout_num_gpus_per_engine)),
    "enable-deepep-moe": Rename("moe-a2a-backend", lambda _: "deepep"),
    "enable-flashinfer-cutlass-moe": Rename("moe-runner-backend", lambda _: "flashinfer_cutlass"),
}
"""Switches of earlier releases of SGLang's server, without dashes; only where the installed one
does not have them."""


def without_engines(config: MilesConfig, foreign: Sequence[Foreign]) -> list[Problem]:
    """Like our own flags of engines; recorded rollouts are looked into with the command line of the
    run that made them."""
    if not is_supervised(config):
        return []
    remedy = (
        "applies only where there are engines: not to --loss-type sft_loss without evaluation; "
        "change that or leave this out"
    )
    return [Problem(flag.name, flag.value, remedy) for flag in foreign]


def of_the_embedded_engine(
    config: MilesConfig, given: Given, foreign: Sequence[Foreign], reason: str
) -> list[Problem]:
    """Each of SGLang's own flags by name, with why the engine is not SGLang where that was not
    asked for; one problem for all of them where only the package is missing."""
    dests = [dest for dest in ONLY_SGLANG if dest in given]
    asked = config.rollout.rollout_engine == "embedded"
    names = [*(problem(config, d, remedy="").flag for d in dests), *(f.name for f in foreign)]
    if names and not asked and not package.is_installed():
        return [Problem(", ".join(names), "", package.missing())]
    why = "" if asked else f", which --rollout-engine auto is here ({reason}),"
    remedy = f"the embedded engine{why} has no such flag; leave it out, or --rollout-engine sglang"
    ours = [spec.on for spec in flag_specs(MilesConfig)]
    problems = [problem(config, dest, remedy=remedy) for dest in dests]
    for flag in foreign:
        refused = SERVER.get(flag.name.removeprefix(SERVER_PREFIX))
        if refused is not None:  # Nor does SGLang take it from here.
            text = f"leave it out: {refused}"
        else:
            text = f"{_no_router(flag) or remedy}. {did_you_mean(flag.name, ours)}".rstrip(" .")
        problems.append(Problem(flag.name, flag.value, text))
    return problems


def _no_router(flag: Foreign) -> str | None:
    if not flag.name.startswith(ROUTER_PREFIX):
        return None
    return (
        "no router stands before embedded engines, which Miles balances itself; leave it out, or "
        "--rollout-engine sglang"
    )
