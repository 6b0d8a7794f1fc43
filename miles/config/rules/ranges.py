"""The range of every number, and which texts and lists have a form of their own."""

import math
from dataclasses import dataclass

from miles.config.errors import Problem
from miles.config.flags import flag_specs
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem, values_of


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number. ``off`` is one value outside them that is allowed too."""

    above: float = -math.inf
    """Exclusive."""
    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    """Exclusive."""
    off: float | None = None
    off_means: str = "off"
    why: str = ""

    def holds(self, value: float) -> bool:
        inside = self.above < value < self.below and self.least <= value <= self.most
        return inside or value == self.off

    def remedy(self) -> str:
        bounds = [
            f"{sign} {bound:.15g}"
            for sign, bound in (
                (">", self.above),
                (">=", self.least),
                ("<=", self.most),
                ("<", self.below),
            )
            if math.isfinite(bound)
        ]
        text = "must be " + " and ".join(bounds)
        text += f", or {self.off:g} for {self.off_means}" if self.off is not None else ""
        return f"{text}: {self.why}" if self.why else text


POSITIVE = Range(above=0)
COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)
FRACTION = Range(least=0, most=1)
DECAY = Range(least=0, below=1)
SEED = Range(least=0, most=2**32 - 1)
NUCLEUS = Range(above=0, most=1)
COUNT_OR_OFF = Range(least=1, off=-1)
ANY = Range()

RANGES: dict[str, Range] = {
    "actor_num_nodes": COUNT,
    "actor_num_gpus_per_node": COUNT,
    "num_gpus_per_node": COUNT,
    "rollout_num_gpus": COUNT,
    "rollout_num_gpus_per_engine": COUNT,
    "distributed_timeout_minutes": COUNT,
    "placement_timeout_s": POSITIVE,
    "num_rollout": COUNT,
    "num_epoch": COUNT,
    "start_rollout_id": NOT_NEGATIVE,
    "rollout_batch_size": COUNT,
    "n_samples_per_prompt": COUNT,
    "global_batch_size": COUNT,
    "num_steps_per_rollout": COUNT,
    "micro_batch_size": COUNT,
    "max_tokens_per_gpu": COUNT,
    "rollout_seed": SEED,
    "rollout_temperature": Range(
        above=0,
        why="the trainer divides its logits by it, and the log-probs of greedy decoding (0) are "
        "undefined; a small one such as 0.1 is nearly greedy",
    ),
    "rollout_top_p": NUCLEUS,
    "rollout_top_k": COUNT_OR_OFF,
    "rollout_max_context_len": Range(least=2, why="a prompt token and a response token"),
    "rollout_max_prompt_len": COUNT,
    "rollout_max_response_len": COUNT,
    "over_sampling_batch_size": COUNT,
    "generate_max_turns": COUNT,
    "generate_tool_timeout_s": POSITIVE,
    "sglang_server_concurrency": COUNT,
    "sglang_context_length": COUNT,
    "sglang_max_running_requests": COUNT,
    "sglang_max_total_tokens": COUNT,
    "sglang_router_port": Range(least=1, most=65535),
    "sglang_mem_fraction_static": Range(above=0, below=1, why="a share of the device's memory"),
    "rollout_engine_start_timeout_s": POSITIVE,
    "rollout_health_check_interval": NOT_NEGATIVE,
    "rollout_health_check_timeout": POSITIVE,
    "rollout_health_check_first_wait": NOT_NEGATIVE,
    "rollout_request_timeout_s": POSITIVE,
    "rm_timeout_s": POSITIVE,
    "rm_max_retries": NOT_NEGATIVE,
    "rm_default": ANY,
    "gamma": FRACTION,
    "eps_clip": Range(least=0, most=1, why="the lower clip is 1 - it"),
    "eps_clip_high": NOT_NEGATIVE,
    "eps_clip_c": Range(above=1, why="the dual clip bounds the loss at it times -advantage"),
    "entropy_coef": NOT_NEGATIVE,
    "kl_coef": NOT_NEGATIVE,
    "kl_loss_coef": NOT_NEGATIVE,
    "ref_update_interval": COUNT,
    "tis_clip": POSITIVE,
    "tis_clip_low": NOT_NEGATIVE,
    "opsm_delta": NOT_NEGATIVE,
    "log_probs_chunk_size": Range(
        least=1, off=-1, off_means="a size chosen by the vocabulary, as without the flag"
    ),
    "seed": SEED,
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "lr_decay_iters": COUNT,
    "lr_warmup_iters": NOT_NEGATIVE,
    "lr_warmup_fraction": DECAY,
    "lr_warmup_init": NOT_NEGATIVE,
    "lr_wsd_decay_iters": COUNT,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": DECAY,
    "adam_beta2": DECAY,
    "adam_eps": POSITIVE,
    "clip_grad": NOT_NEGATIVE,
    "eval_interval": COUNT,
    "n_samples_per_eval_prompt": COUNT,
    "eval_temperature": Range(least=0, why="0 is greedy"),
    "eval_top_p": NUCLEUS,
    "eval_top_k": COUNT_OR_OFF,
    "eval_max_response_len": COUNT,
    "dp_replicate_size": COUNT,
    "context_parallel_size": COUNT,
    "save_interval": COUNT,
    "offload_train_disk_chunk_mb": Range(
        least=1, most=2047, why="one call of the kernel moves less than 2 GiB"
    ),
    "save_keep": COUNT,
    "update_weight_buffer_size": COUNT,
    "update_weight_timeout_s": POSITIVE,
    "debug_exit_after_rollout": COUNT,
}


def numbers_are_in_range(config: MilesConfig, given: Given) -> list[Problem]:
    """Every number is in its range."""
    values = values_of(config)
    return [
        problem(config, dest, remedy=allowed.remedy() + _alternative(dest))
        for dest, allowed in RANGES.items()
        if values[dest] is not None
        and not allowed.holds(values[dest])
        and (dest in given or not _is_derived(dest))
    ]


def token_ids_are_not_negative(config: MilesConfig, given: Given) -> list[Problem]:
    """Stop token ids are ids."""
    if all(token >= 0 for token in config.rollout.rollout_stop_token_ids):
        return []
    return [problem(config, "rollout_stop_token_ids", remedy="token ids are not negative")]


def environment_is_text(config: MilesConfig, given: Given) -> list[Problem]:
    """Environment variables are text, under names that an environment can have."""
    variables = config.cluster.train_env_vars
    remedies: list[str] = []
    if wrong := [k for k, v in variables.items() if not isinstance(v, str)]:
        remedies.append(
            f'values must be text; put quotes around that of {", ".join(wrong)}: {{"A": "1"}}'
        )
    if wrong := [k for k in variables if not k or "=" in k or "\0" in k]:
        remedies.append(
            f"{', '.join(map(repr, wrong))} cannot be the name of a variable, which has at least "
            "one character, no '=' and no NUL"
        )
    if wrong := [k for k, v in variables.items() if isinstance(v, str) and "\0" in v]:
        remedies.append(
            f"the value of {', '.join(wrong)} holds a NUL, which ends a text; remove it"
        )
    return [problem(config, "train_env_vars", remedy=remedy) for remedy in remedies]


def exports_have_their_own_path(config: MilesConfig, given: Given) -> list[Problem]:
    """The template of --save-hf has no other field than {rollout_id}."""
    template = config.checkpoint.save_hf
    if template is None:
        return []
    try:
        template.format(rollout_id=0)
    except (KeyError, IndexError, ValueError):
        remedy = "must be a path whose only field in braces is {rollout_id}"
        return [problem(config, "save_hf", remedy=remedy)]
    return []


def log_level_is_known(config: MilesConfig, given: Given) -> list[Problem]:
    """The engine server's log level is one of logging's, in upper or lower case."""
    levels = ("critical", "error", "warning", "info", "debug")
    if config.rollout.sglang_log_level.lower() in levels:
        return []
    return [problem(config, "sglang_log_level", remedy=f"choose from {', '.join(levels)}")]


def _alternative(dest: str) -> str:
    """A flag that has no default can be left out, where no run needs it."""
    return "; or leave it out" if dest in _OPTIONAL else ""


_NEEDED = frozenset(
    (
        "num_rollout",
        "num_epoch",
        "rollout_batch_size",
        "rollout_num_gpus",
        "rollout_max_response_len",
    )
)
_OPTIONAL = frozenset(s.dest for s in flag_specs(MilesConfig) if s.default is None) - _NEEDED


def _is_derived(dest: str) -> bool:
    """Derived from another flag, which is in the table itself and is the one to name."""
    return dest.startswith("eval_") or dest in (
        "over_sampling_batch_size",
        "rollout_max_prompt_len",
        "eps_clip_high",
    )


RANGE_CHECKS: tuple[Check, ...] = (
    numbers_are_in_range,
    token_ids_are_not_negative,
    environment_is_text,
    exports_have_their_own_path,
    log_level_is_known,
)
