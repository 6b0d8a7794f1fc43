"""Evaluation sets."""

from dataclasses import dataclass
from typing import Annotated

from miles.config.flags import Doc, Flag


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation: held-out prompts, scored between rollouts."""

    eval_interval: Annotated[
        int | None, Doc("Rollouts between evaluations."), Flag(shared=True)
    ] = None
    eval_prompt_data: Annotated[
        tuple[str, ...], Doc("Pairs of a name and prompt data: name file [name file ...].")
    ] = ()
    skip_eval_before_train: Annotated[bool, Doc("No evaluation before the first rollout.")] = False
    n_samples_per_eval_prompt: Annotated[int, Doc("Responses to each held-out prompt.")] = 1
    eval_temperature: Annotated[
        float | None, Doc("Sampling temperature, 0 is greedy; by default the rollout's.")
    ] = None
    eval_top_p: Annotated[float | None, Doc("Nucleus sampling; by default the rollout's.")] = None
    eval_top_k: Annotated[int | None, Doc("Top-k sampling; by default the rollout's.")] = None
    eval_max_response_len: Annotated[
        int | None, Doc("Most new tokens; by default the rollout's.")
    ] = None
    eval_input_key: Annotated[str | None, Doc("Column of the prompt; by default --input-key.")] = (
        None
    )
    eval_label_key: Annotated[str | None, Doc("Column of the label; by default --label-key.")] = (
        None
    )
    log_passrate: Annotated[bool, Doc("Log pass@k for k = 1, 2, 4, ... in evaluation.")] = False
