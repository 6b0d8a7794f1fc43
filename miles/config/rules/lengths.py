"""How long prompts, responses and contexts may be, as far as flags say it."""

from miles.config.derived import token_budget
from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import Check, Given, problem


def samples_fit_the_token_budget(config: MilesConfig, given: Given) -> list[Problem]:
    """No sample that the lengths allow is longer than a micro-batch may be."""
    budget, rollout = token_budget(config), config.rollout
    context, response = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    if budget is None:
        return []
    if context is not None:
        if context <= budget:
            return []
        remedy = (
            f"one sample may exceed {_budget_text(config)}; raise the first or lower the second"
        )
        return [problem(config, "max_tokens_per_gpu", "rollout_max_context_len", remedy=remedy)]
    if response is None:
        return []
    prompt = rollout.rollout_max_prompt_len
    if response + (prompt or 1) <= budget:
        return []
    dests = ["rollout_max_response_len"] + (["rollout_max_prompt_len"] if prompt else [])
    remedy = (
        f"prompt and response of one sample ({response + (prompt or 1)} tokens) may exceed "
        f"{_budget_text(config)}; raise the first or lower the others"
    )
    return [problem(config, "max_tokens_per_gpu", *dests, remedy=remedy)]


def lengths_fit_the_context(config: MilesConfig, given: Given) -> list[Problem]:
    """Prompt, context and engine lengths nest."""
    rollout = config.rollout
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    engine = rollout.sglang_context_length
    problems: list[Problem] = []
    if context is not None and prompt is not None and prompt > context - 1:
        remedy = "a prompt must leave room for a response token: at most the second - 1"
        dests = ("rollout_max_prompt_len", "rollout_max_context_len")
        problems.append(problem(config, *dests, remedy=remedy))
    if context is not None and engine is not None and context > engine:
        remedy = "engines refuse samples longer than the second; lower the first"
        dests = ("rollout_max_context_len", "sglang_context_length")
        problems.append(problem(config, *dests, remedy=remedy))
    return problems


def responses_fit_the_context(config: MilesConfig, given: Given) -> list[Problem]:
    """A response can be as long as its flag says, after the longest prompt that a user allows."""
    rollout = config.rollout
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    if context is None:
        return []
    problems: list[Problem] = []
    lengths = (
        ("rollout_max_response_len", rollout.rollout_max_response_len),
        ("eval_max_response_len", config.evaluation.eval_max_response_len),
    )
    for dest, response in lengths:
        if response is None or dest not in given:
            continue
        if response > context:
            remedy = "prompt and response together are at most the second; lower the first"
            problems.append(problem(config, dest, "rollout_max_context_len", remedy=remedy))
        elif (
            "rollout_max_prompt_len" in given
            and prompt is not None
            and prompt < context < (prompt + response)
        ):
            remedy = (
                f"prompt and response may have {prompt + response} tokens, more than the third; "
                "raise that, or lower one of the others"
            )
            dests = ("rollout_max_prompt_len", dest, "rollout_max_context_len")
            problems.append(problem(config, *dests, remedy=remedy))
    return problems


def _budget_text(config: MilesConfig) -> str:
    ranks = config.cluster.context_parallel_size
    if ranks == 1:
        return "the budget of a GPU"
    return f"the budget of its {ranks} GPUs (--context-parallel-size {ranks} x the first)"


LENGTH_CHECKS: tuple[Check, ...] = (
    samples_fit_the_token_budget,
    lengths_fit_the_context,
    responses_fit_the_context,
)
