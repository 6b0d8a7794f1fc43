"""What the model allows: the most tokens of prompt and response together, and which token ids."""

from collections.abc import Callable
from dataclasses import replace

from miles.config.derived import needs_engines
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem, values_of
from miles.core import hf

OF_THE_CONTEXT = ("rollout_max_context_len", "sglang_context_length")
WITHIN_THE_CONTEXT = (
    "rollout_max_prompt_len",
    "rollout_max_response_len",
    "eval_max_response_len",
)


def check(config: MilesConfig) -> list[Problem]:
    """Lengths and token ids that the model does not have."""
    return [*_lengths(config), *_stop_ids(config)]


def _stop_ids(config: MilesConfig) -> list[Problem]:
    size = _stated(config, hf.stated_vocabulary_size)
    unknown = [token for token in config.rollout.rollout_stop_token_ids if size and token >= size]
    if not unknown:
        return []
    remedy = f"the model has no token {unknown[0]}: its ids go from 0 to {(size or 0) - 1}"
    return [problem(config, "rollout_stop_token_ids", remedy=remedy)]


def _lengths(config: MilesConfig) -> list[Problem]:
    """Lengths that engines cannot serve, because the model has fewer positions.

    Without a flag for the context it is the model's, so that prompts and responses have to fit too.
    """
    length, rollout = _stated(config, hf.stated_context_length), config.rollout
    if length is None or not needs_engines(config):
        return []
    if rollout.sglang_context_length is not None and rollout.rollout_engine != "embedded":
        return []  # SGLang serves beyond the model's positions when told to.
    values = values_of(config)
    open_context = all(values[dest] is None for dest in OF_THE_CONTEXT)
    dests = WITHIN_THE_CONTEXT if open_context else OF_THE_CONTEXT
    remedy = f"the model has {length} positions (config.json of --hf-checkpoint); lower it"
    own = rollout.rollout_max_response_len
    return [
        problem(config, dest, remedy=remedy)
        for dest in dests
        if (values[dest] or 0) > length - (dest == "rollout_max_prompt_len")
        # Evaluation has the rollout's by default, whose problem this is.
        and not (dest == "eval_max_response_len" and values[dest] == own)
    ]


def with_context_length(config: MilesConfig, unserved: int = 0) -> MilesConfig:
    """Bound prompt and response by what the engines serve, where no flag asks for less:
    ``unserved`` positions of their context are of no use."""
    rollout = config.rollout
    asked = rollout.rollout_max_context_len
    if asked is not None and not unserved:
        return config
    length = rollout.sglang_context_length
    if length is None:
        length = hf.context_length(hf.load_config(str(rollout.hf_checkpoint)))
    if length is None:
        return config
    served = length - unserved if asked is None else min(asked, length - unserved)
    return replace(config, rollout=replace(rollout, rollout_max_context_len=served))


def _stated(config: MilesConfig, ask: Callable[[str], int | None]) -> int | None:
    """``None`` where the config does not state it, or cannot be read, which has its own rule."""
    path = config.rollout.hf_checkpoint
    try:
        return None if path is None else ask(path)
    except hf.CheckpointDirError:
        return None
