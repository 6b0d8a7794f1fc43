"""The values that cross a seam: prompts, samples, training batches, statistics and weight buckets.

Shape letters: ``N`` samples, ``T`` tokens (prompt and response), ``R`` response tokens,
``S`` packed sequences of a micro-batch, ``P`` optimizer steps of a rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = dict[str, Any]
"""One chat message, OpenAI style: ``role``, ``content``, optionally ``tool_calls`` and so on."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompt data, ready to be sent: what a whole group of samples starts from."""

    group_id: int
    """Position in the endless stream of prompts (over all epochs); unique in a run."""
    text: str
    """The rendered prompt (after the chat template, when one applies)."""
    tokens: tuple[int, ...]
    """Token ids of ``text``."""
    messages: tuple[Message, ...] | None = None
    """The conversation, when the row holds one."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Tool schemas of the row."""
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Status(StrEnum):
    """How generation of a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    """A stop token or stop string was produced, or a multi-turn function said it is done."""
    TRUNCATED = "truncated"
    """The token limit ended it."""
    ABORTED = "aborted"
    """Stopped from outside; its tokens are kept for a partial rollout."""
    FAILED = "failed"
    """Generation failed for good; it is not scored and never contributes to a loss."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One response to one prompt, with everything the reward and the trainer need.

    ``loss_mask``, ``rollout_log_probs`` and ``tokens[-response_length:]`` run in step.
    """

    prompt: Prompt
    index: int
    """Unique in a run: ``group_id * n_samples_per_prompt + position in the group``."""
    tokens: list[int]
    """Prompt and response token ids."""
    response_length: int = 0
    response: str = ""
    loss_mask: list[int] = field(default_factory=list[int])
    """1 where the policy wrote the token and it trains, else 0 (tool output, masked old tokens)."""
    rollout_log_probs: list[float] = field(default_factory=list[float])
    """Log-softmax of logits / temperature under the engine; NaN where the engine gave none."""
    weight_versions: list[int] = field(default_factory=list[int])
    """One weight version for each generation call that contributed."""
    status: Status = Status.PENDING
    reward: float | dict[str, Any] | None = None
    remove_sample: bool = False
    """Counts for group statistics, but its loss mask becomes all zero."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    def validate(self) -> None:
        """Raise ``ValueError`` when the parallel lists do not have ``response_length`` entries."""
        lengths = {
            "loss_mask": len(self.loss_mask),
            "rollout_log_probs": len(self.rollout_log_probs),
        }
        wrong = {k: v for k, v in lengths.items() if v != self.response_length}
        if wrong or self.response_length > len(self.tokens):
            raise ValueError(
                f"sample {self.index}: response_length {self.response_length}, "
                f"{len(self.tokens)} tokens, but {wrong or 'more response than tokens'}"
            )


Group = list[Sample]
"""All samples of one prompt, in index order."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The samples that one data-parallel rank trains on in one rollout, as flat arrays.

    The arrays are read-only (they live in shared memory). Ragged fields are concatenated;
    ``*_offsets`` delimit samples. ``rollout/batch.py`` builds it together with the schedule:
    every rank has the same steps and the same number of micro-batches in each step.
    """

    rollout_id: int
    tokens_T: Int32
    token_offsets: Int64
    """``[N + 1]`` into ``tokens_T``."""
    response_lengths: Int32
    """``[N]``: the last so many tokens of a sample are its response."""
    loss_mask_R: Int32
    """0 or 1 for each response token, samples concatenated."""
    response_offsets: Int64
    """``[N + 1]`` into the ``_R`` arrays."""
    rollout_log_probs_R: Float32 | None
    """Engine log-probs; ``None`` when the samples carry none (supervised data)."""
    rewards: Float32
    """``[N]`` after group normalisation: what the advantage estimators start from."""
    raw_rewards: Float32
    """``[N]`` as the reward function gave them."""
    sample_indices: Int64
    """``[N]``: ``Sample.index``."""
    group_ids: Int64
    """``[N]``."""
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """``[step][micro-batch]`` -> positions (0 .. N-1) of its samples. An empty inner tuple is a
    filler: this rank has no sample left but must take part in the collectives."""
    step_num_samples: tuple[int, ...]
    """``[P]``: samples with a trainable token in the step over **all** ranks (sample-mean)."""
    step_num_tokens: tuple[int, ...]
    """``[P]``: sum of the loss mask in the step over **all** ranks (token-mean denominator)."""

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def num_steps(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A few samples as tensors, packed one behind the other, on the training device.

    ``tokens_T[logit_index_R + 1] == targets_R``: the logits at ``logit_index_R`` predict the
    response token. A filler micro-batch has one short sequence and ``R == 0``.
    """

    tokens_T: "Tensor"
    """int64 ``[T]``."""
    position_ids_T: "Tensor"
    """int64 ``[T]``, restarting at 0 for each sequence."""
    cu_seqlens_S: "Tensor"
    """int32 ``[S + 1]``, cumulative sequence lengths."""
    max_seqlen: int
    logit_index_R: "Tensor"
    """int64 ``[R]`` into T."""
    targets_R: "Tensor"
    """int64 ``[R]`` token ids."""
    sequence_R: "Tensor"
    """int64 ``[R]``: which sequence (0 .. S-1) the response token belongs to."""
    loss_mask_R: "Tensor"
    """float32 ``[R]``."""
    rollout_log_probs_R: "Tensor | None"
    """float32 ``[R]``; NaN where the engine gave none."""
    rewards_S: "Tensor"
    """float32 ``[S]``, normalised rewards."""
    sample_positions: tuple[int, ...]
    """Positions of the S sequences in the shard; empty for a filler."""
    packed: bool
    """True: run as one row without padding. False: the backend pads to ``[S, max_seqlen]``."""
    old_log_probs_R: "Tensor | None" = None
    """float32 ``[R]``: of the weights before this rollout's first step. ``None`` in the first
    step when the current weights are those: the loss then uses its own log-probs, detached."""
    ref_log_probs_R: "Tensor | None" = None
    advantages_R: "Tensor | None" = None
    """float32 ``[R]``; ``None`` for supervised data and before advantages are computed."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens_S) - 1


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """What a forward pass says about each response token. float32 ``[R]``, with gradient."""

    log_probs_R: "Tensor"
    entropy_R: "Tensor | None"
    """Of the temperature-scaled distribution; ``None`` unless it was asked for."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """The loss of one micro-batch.

    ``loss`` is already divided by the step's **global** count, so that the gradient of a step is
    the plain **sum** of the gradients over micro-batches and ranks.
    """

    loss: "Tensor"
    """float32 scalar with gradient."""
    sums: Mapping[str, "Tensor"]
    """Detached float32 scalars, to be summed over micro-batches and ranks. The key says what to
    divide by: the denominator of ``x`` is the sum named in ``training_utils/metrics.py``."""


LossFn = Callable[[MicroBatch, TokenStats], LossOutput]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One optimizer step, equal on every rank."""

    loss: float
    grad_norm: float
    """Before clipping; not finite when the step was skipped."""
    learning_rate: float
    skipped: bool
    """True when a non-finite gradient kept the weights and the optimizer state unchanged."""
    sums: Mapping[str, float]
    """``LossOutput.sums``, summed over micro-batches and data-parallel ranks; beside them what the
    backend itself measures in a step, as means."""


@dataclass(frozen=True, kw_only=True)
class TrainStats:
    """One rollout's training, equal on every rank."""

    metrics: Mapping[str, float]
    """``train/...`` means over the rollout's steps; ``perf/...`` seconds of this rank's phases."""
    steps: Sequence[StepStats]


@dataclass(frozen=True)
class NamedTensor:
    """A full (unsharded) weight under its Hugging Face name, in the checkpoint's dtype."""

    name: str
    tensor: "Tensor"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What an engine needs to know to receive a tensor. ``dtype`` without ``torch.``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}")
        return dtype


@dataclass(frozen=True, kw_only=True)
class WeightBucket:
    """Some weights that travel together: one dtype, contiguous tensors, bounded bytes."""

    tensors: tuple[NamedTensor, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=t.name,
                dtype=str(t.tensor.dtype).removeprefix("torch."),
                shape=tuple(t.tensor.shape),
            )
            for t in self.tensors
        )

    @property
    def num_bytes(self) -> int:
        return sum(t.tensor.numel() * t.tensor.element_size() for t in self.tensors)
