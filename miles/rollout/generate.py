"""One prompt to a group of samples, single turn; and what every generate function needs."""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from miles.contracts.engine import Completion, FinishReason, GenerateRequest
from miles.contracts.hooks import GenerateContext
from miles.contracts.types import Prompt, Sample, Status
from miles.core.stop_strings import tokens_to_stop

STATUS_OF: dict[FinishReason, Status] = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}


async def generate(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Answer a prompt ``context.num_samples`` times.

    Samples without a token yet share one request, so that the prompt is prefilled once. Each
    aborted sample of ``context.unfinished`` goes on with a request of its own for the tokens that
    are left; finished ones stay as they are.
    """
    samples = start_samples(prompt, context)
    fresh = [i for i, s in enumerate(samples) if not s.response_length and is_open(s)]
    partial = [i for i, s in enumerate(samples) if s.response_length and is_open(s)]
    admissions = [context.admission] + [None] * len(partial)
    calls = [[i] for i in partial]
    if fresh:
        calls.insert(0, fresh)
    await run_together(
        extend_samples([samples[i] for i in call], context, admission=admission)
        for call, admission in zip(calls, admissions, strict=False)
    )
    return samples


async def run_together[T](coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at once and return what they return, in order; when one fails the others are
    cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def is_open(sample: Sample) -> bool:
    """Whether the sample still wants tokens."""
    return sample.status in (Status.PENDING, Status.ABORTED)


def sampling_seed(rollout_seed: int, rollout_id: int, sample_index: int) -> int:
    """The seed of one sample's noise: the first 8 bytes, little-endian, of BLAKE2b over
    ``"rollout_seed:rollout_id:sample_index"``, without the top bit (0 .. 2**63 - 1)."""
    text = f"{rollout_seed}:{rollout_id}:{sample_index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def start_samples(prompt: Prompt, context: GenerateContext) -> list[Sample]:
    """Empty samples of a group, or copies of the unfinished ones.

    Under ``--mask-offpolicy-in-partial-rollout`` the tokens they have do not train: other weights
    wrote them.
    """
    if not context.unfinished:
        return [
            Sample(
                prompt=prompt,
                index=context.first_index + i,
                tokens=list(prompt.tokens),
                metadata=dict(prompt.metadata),
            )
            for i in range(context.num_samples)
        ]
    masked = context.config.rollout.mask_offpolicy_in_partial_rollout
    return [
        replace(
            s,
            tokens=list(s.tokens),
            loss_mask=[0] * s.response_length if masked else list(s.loss_mask),
            rollout_log_probs=list(s.rollout_log_probs),
            weight_versions=list(s.weight_versions),
            metadata=dict(s.metadata),
        )
        for s in context.unfinished
    ]


def tokens_left(sample: Sample, context: GenerateContext) -> int:
    """How many more tokens the sample may get; 0 or less when it is full."""
    left = context.params.max_new_tokens - sample.response_length
    limit = context.config.rollout.rollout_max_context_len
    return left if limit is None else min(left, limit - len(sample.tokens))


async def extend_samples(
    samples: Sequence[Sample],
    context: GenerateContext,
    *,
    turn: int = 0,
    turn_start: int = 0,
    admission: tuple[str, int, int] | None = None,
) -> None:
    """Let the policy go on with samples that have equal tokens, in one request.

    A later ``turn`` of the same sample draws other noise; what its response has behind
    ``turn_start`` is of this turn already. Raises ``ValueError`` when a prompt leaves no room for a
    response.
    """
    first = samples[0]
    left = tokens_left(first, context)
    if left <= 0:
        if not first.response_length:
            raise ValueError(
                f"the prompt has {len(first.tokens)} tokens, which leaves no room under "
                f"--rollout-max-context-len {context.config.rollout.rollout_max_context_len}"
            )
        for sample in samples:
            sample.status = Status.TRUNCATED
        return
    request = GenerateRequest(
        input_ids=tuple(first.tokens),
        params=replace(
            context.params, max_new_tokens=left, sampling_seeds=_seeds(samples, context, turn)
        ),
        n=len(samples),
        admission=admission,
    )
    completions = await context.engines.generate(request)
    for sample, completion in zip(samples, completions, strict=True):
        _append(sample, _up_to_a_stop(sample, turn_start, completion, context), context)


def _seeds(
    samples: Sequence[Sample], context: GenerateContext, turn: int
) -> tuple[int, ...] | None:
    seeds = context.params.sampling_seeds
    if seeds is None:
        return None
    own = [seeds[s.index - context.first_index] for s in samples]
    return tuple(seed if turn == 0 else sampling_seed(seed, turn, 0) for seed in own)


def _up_to_a_stop(
    sample: Sample, turn_start: int, completion: Completion, context: GenerateContext
) -> Completion:
    """The completion up to where it ends a stop string that the aborted request before it had
    begun: the engine has seen its end alone."""
    begun = sample.tokens[len(sample.tokens) - sample.response_length + turn_start :]
    stops = context.params.stop
    count = tokens_to_stop(context.tokenizer, begun, completion.output_ids, stops)
    if count is None:
        return completion
    return replace(
        completion,
        output_ids=completion.output_ids[:count],
        log_probs=completion.log_probs[:count],
        finish_reason="stop",
    )


def _append(sample: Sample, completion: Completion, context: GenerateContext) -> None:
    response_before = sample.response_length
    sample.tokens += completion.output_ids
    sample.response_length += len(completion.output_ids)
    sample.loss_mask += [1] * len(completion.output_ids)
    sample.rollout_log_probs += completion.log_probs
    if completion.output_ids:
        sample.weight_versions.append(completion.weight_version)
    sample.status = STATUS_OF[completion.finish_reason]
    sample.response = completion.text if not response_before else response_text(sample, context)


def response_text(sample: Sample, context: GenerateContext) -> str:
    """The response decoded as a whole: a character may span two calls."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    skip = context.params.skip_special_tokens
    return context.tokenizer.decode(response, skip_special_tokens=skip)
