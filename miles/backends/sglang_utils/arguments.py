"""A job's flags as the command line of ``sglang.launch_server``; imports no sglang."""

from miles.config.root import MilesConfig
from miles.core import device, hf

DEFAULT_MAX_RUNNING_REQUESTS = 256
CPU_MEMORY_SHARE = 0.8
"""Of the host's available memory, for weights and key/value cache of all engines together."""
CPU_CACHE_TOKENS = 65_536
"""Most tokens in the key/value cache of an engine on the host, which the trainer shares."""


def server_arguments(config: MilesConfig, index: int, num_engines: int) -> list[str]:
    """Arguments of the server at ``index`` of the job's ``num_engines``, without host and port."""
    rollout = config.rollout
    options: dict[str, object | None] = {
        "--model-path": rollout.hf_checkpoint,
        "--tp-size": config.cluster.rollout_num_gpus_per_engine,
        "--dtype": _dtype(config),
        "--log-level": rollout.sglang_log_level.lower(),
        "--context-length": rollout.sglang_context_length,
        "--max-running-requests": rollout.sglang_max_running_requests,
        "--random-seed": config.data.rollout_seed + index,
    }
    pairs = [str(x) for k, v in options.items() if v is not None for x in (k, v)]
    where = [] if device.has_accelerator() else cpu_arguments(config, num_engines)
    return [*pairs, "--trust-remote-code", "--skip-server-warmup", *where]


def cpu_arguments(config: MilesConfig, num_engines: int) -> list[str]:
    """What SGLang needs to run on the host, through ``miles_plugins/sglang_cpu``."""
    rollout = config.rollout
    options: dict[str, object] = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--mem-fraction-static": round(CPU_MEMORY_SHARE / num_engines, 3),
        "--max-total-tokens": max(CPU_CACHE_TOKENS, rollout.sglang_context_length or 0),
    }
    if rollout.sglang_max_running_requests is None:
        options["--max-running-requests"] = DEFAULT_MAX_RUNNING_REQUESTS
    pairs = [str(x) for pair in options.items() for x in pair]
    return [*pairs, "--sleep-on-idle"]


def _dtype(config: MilesConfig) -> str:
    """float16 under ``--fp16``, else the checkpoint's: SGLang's own default makes float16 of
    float32."""
    return "float16" if config.precision.fp16 else hf.dtype_name(str(config.rollout.hf_checkpoint))
