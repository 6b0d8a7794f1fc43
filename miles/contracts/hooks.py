"""The signatures of user code: every ``--…-path`` flag names something that matches one of these.

``HOOKS`` says which flag takes which; the command line checks each when it is parsed. A function
marked "may be async" is awaited when it is a coroutine function, else run in a thread.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miles.config.root import MilesConfig
from miles.contracts.engine import Completion, GenerateRequest, SamplingParams
from miles.contracts.types import Group, LossOutput, MicroBatch, Prompt, Sample, TokenStats
from miles.core import plugins

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class Generator(Protocol):
    """What a generate function may ask of the engines."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Run one request; returns ``request.n`` completions. Raises ``EngineError``."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerateContext:
    """What a generate function gets beside the prompt."""

    config: MilesConfig
    engines: Generator
    tokenizer: Any
    params: SamplingParams
    num_samples: int
    evaluation: bool
    first_index: int
    """``Sample.index`` of the group's first sample."""
    unfinished: tuple[Sample, ...] = ()
    """Aborted samples of an earlier rollout to go on with (``--partial-rollout``)."""
    admission: tuple[str, int, int] | None = None
    """See ``GenerateRequest.admission``; to be handed on with the first request."""


async def generate(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """``--custom-generate-function-path``: ``context.num_samples`` samples in index order."""
    ...  # pyright: ignore[reportReturnType]


def reward(sample: Sample, config: MilesConfig) -> float | dict[str, Any]:
    """``--custom-rm-path``: score one sample; may be async."""
    ...  # pyright: ignore[reportReturnType]


def group_reward(samples: list[Sample], config: MilesConfig) -> list[float | dict[str, Any]]:
    """``--custom-rm-path`` with ``--group-rm``: score a group at once; may be async."""
    ...  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class FilterDecision:
    """Whether a group is kept, and if not, why (counted as a metric)."""

    keep: bool
    reason: str = "filtered"


def dynamic_filter(group: Group, config: MilesConfig) -> FilterDecision | bool:
    """``--dynamic-sampling-filter-path``."""
    ...  # pyright: ignore[reportReturnType]


def buffer_filter(buffer: list[Group], num_groups: int) -> list[Group]:
    """``--buffer-filter-path``: choose up to ``num_groups`` unfinished groups to go on with."""
    ...  # pyright: ignore[reportReturnType]


def sample_filter(groups: list[Group], config: MilesConfig) -> None:
    """``--rollout-sample-filter-path``: set ``remove_sample`` where a sample must not train."""
    ...  # pyright: ignore[reportReturnType]


def all_samples_process(groups: list[Group], config: MilesConfig) -> None:
    """``--rollout-all-samples-process-path``: sees every finished group, kept or not."""
    ...  # pyright: ignore[reportReturnType]


def reward_post_process(
    samples: list[Sample], raw_rewards: NDArray[np.float32], config: MilesConfig
) -> NDArray[np.float32]:
    """``--custom-reward-post-process-path``: float32 ``[N]`` in, float32 ``[N]`` out."""
    ...  # pyright: ignore[reportReturnType]


def execute_tool(name: str, arguments: dict[str, Any], metadata: Mapping[str, Any]) -> str:
    """``--generate-execute-tool-function-path``: run one tool call; may be async."""
    ...  # pyright: ignore[reportReturnType]


class DataSource(Protocol):
    """``--data-source-path``: a class made with ``(config, tokenizer)``."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        ...

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts of the endless stream, in order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream; plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def data_source(config: MilesConfig, tokenizer: Any) -> DataSource:
    """How ``--data-source-path`` is called."""
    ...  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, kw_only=True)
class RolloutOutput:
    """A finished rollout."""

    groups: list[Group]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """What a rollout function gets."""

    config: MilesConfig
    engines: Generator
    tokenizer: Any
    data_source: DataSource


async def rollout(rollout_id: int, context: RolloutContext) -> RolloutOutput:
    """``--rollout-function-path``: return ``--rollout-batch-size`` scored groups."""
    ...  # pyright: ignore[reportReturnType]


async def evaluation(rollout_id: int, context: RolloutContext) -> dict[str, float]:
    """``--eval-function-path``: return metrics; ``eval/`` is put in front of each name."""
    ...  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Global counts of the optimizer step, for a loss's normalisation."""

    num_samples: int
    num_tokens: int


def loss(batch: MicroBatch, stats: TokenStats, scale: LossScale, config: MilesConfig) -> LossOutput:
    """``--custom-loss-function-path``."""
    ...  # pyright: ignore[reportReturnType]


def importance_weights(log_ratio_R: "Tensor", batch: MicroBatch, config: MilesConfig) -> "Tensor":
    """``--custom-tis-function-path``: float32 ``[R]`` weights from log(trainer / engine)."""
    ...  # pyright: ignore[reportReturnType]


def rollout_log(
    rollout_id: int, groups: list[Group], metrics: dict[str, float]
) -> dict[str, float]:
    """``--custom-rollout-log-function-path``: return the metrics to record."""
    ...  # pyright: ignore[reportReturnType]


def eval_log(
    rollout_id: int, samples: Mapping[str, Sequence[Sample]], metrics: dict[str, float]
) -> dict[str, float]:
    """``--custom-eval-rollout-log-function-path``: return the metrics to record."""
    ...  # pyright: ignore[reportReturnType]


def megatron_init(args: Namespace) -> None:
    """``--custom-megatron-init-path``: ``args`` is Megatron's namespace; its groups exist."""
    ...


def megatron_before_log_prob(args: Namespace, model: "list[Module]", store_prefix: str) -> None:
    """``--custom-megatron-before-log-prob-hook-path``: ``model`` are this rank's chunks;
    ``store_prefix`` is ``"ref_"`` for the reference, else empty."""
    ...


def megatron_before_train_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: "list[Module]",
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """``--custom-megatron-before-train-step-hook-path``: ``step_id`` counts within the rollout;
    optimizer and schedule are Megatron's."""
    ...


HOOKS: dict[str, Callable[..., Any]] = {
    "data_source_path": data_source,
    "rollout_function_path": rollout,
    "eval_function_path": evaluation,
    "custom_generate_function_path": generate,
    "generate_execute_tool_function_path": execute_tool,
    "custom_rm_path": reward,
    "custom_reward_post_process_path": reward_post_process,
    "dynamic_sampling_filter_path": dynamic_filter,
    "buffer_filter_path": buffer_filter,
    "rollout_sample_filter_path": sample_filter,
    "rollout_all_samples_process_path": all_samples_process,
    "custom_loss_function_path": loss,
    "custom_tis_function_path": importance_weights,
    "custom_megatron_init_path": megatron_init,
    "custom_megatron_before_log_prob_hook_path": megatron_before_log_prob,
    "custom_megatron_before_train_step_hook_path": megatron_before_train_step,
    "custom_rollout_log_function_path": rollout_log,
    "custom_eval_rollout_log_function_path": eval_log,
}
"""Field of ``HooksConfig`` -> expected signature. ``generate_tool_specs_path`` names a value (a
list of tool schemas), not a function."""


def load_hook(field: str, path: str | None) -> Callable[..., Any] | None:
    """The user's function at ``path``, checked against the signature of that ``HooksConfig`` field;
    ``None`` when no path is given. Raises ``PluginError``."""
    return None if path is None else plugins.load_function(path, HOOKS[field])
