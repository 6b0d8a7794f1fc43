"""A rollout without engines: the samples of ``--loss-type sft_loss`` come from the data itself."""

import math
from dataclasses import dataclass

from miles.config.root import MilesConfig
from miles.contracts.hooks import RolloutContext, RolloutOutput
from miles.contracts.types import Message, Prompt, Sample, Status
from miles.rollout.chat_mask import conversation_tokens
from miles.rollout.chat_template import ChatTemplate


@dataclass(frozen=True)
class _Target:
    """Token ids of prompt and response, and which of them train."""

    tokens: list[int]
    mask: list[int]


async def rollout(rollout_id: int, context: RolloutContext) -> RolloutOutput:
    """Turn the next ``--rollout-batch-size`` rows into groups, for a rollout function.

    A conversation trains as ``--loss-mask-type`` says; a label is its last assistant turn, unless
    it has one. A text row trains on its label and the end-of-text token. What goes beyond
    ``--rollout-max-context-len`` is cut off and counted (``rollout/truncated_ratio``).
    """
    config = context.config
    template = ChatTemplate(
        tokenizer=context.tokenizer, kwargs=config.data.apply_chat_template_kwargs
    )
    num_prompts = config.data.rollout_batch_size
    assert num_prompts is not None, "validated when flags are parsed"
    groups = [
        [
            _sample(prompt, position, target, config)
            for position in range(config.data.n_samples_per_prompt)
        ]
        for prompt in context.data_source.next(num_prompts)
        for target in [_target(prompt, template, config)]
    ]
    truncated = sum(group[0].status is Status.TRUNCATED for group in groups)
    return RolloutOutput(
        groups=groups, metrics={"rollout/truncated_ratio": truncated / len(groups)}
    )


def _target(prompt: Prompt, template: ChatTemplate, config: MilesConfig) -> _Target:
    if prompt.messages is not None:
        messages = list(prompt.messages)
        if prompt.label is not None and messages[-1]["role"] != "assistant":
            turn: Message = {"role": "assistant", "content": prompt.label}
            messages.append(turn)
        tokens, mask = conversation_tokens(
            messages, prompt.tools, template, config.data.loss_mask_type
        )
        return _Target(tokens, mask)
    if prompt.label is None:
        raise ValueError(f"prompt {prompt.group_id} has no label to train on (--label-key)")
    answer = [*template.encode(prompt.label), template.tokenizer.eos_token_id]
    return _Target([*prompt.tokens, *answer], [0] * len(prompt.tokens) + [1] * len(answer))


def _sample(prompt: Prompt, position: int, target: _Target, config: MilesConfig) -> Sample:
    limit = config.rollout.rollout_max_context_len
    tokens, mask = target.tokens[:limit], target.mask[:limit]
    if 1 not in mask:
        raise ValueError(
            f"prompt {prompt.group_id} ({prompt.text[:80]!r}) has nothing to train on within "
            f"--rollout-max-context-len {limit}; raise it, or lower --rollout-max-prompt-len"
        )
    response = mask.index(1)
    length = len(tokens) - response
    return Sample(
        prompt=prompt,
        index=prompt.group_id * config.data.n_samples_per_prompt + position,
        tokens=list(tokens),
        response_length=length,
        response=prompt.label or "",
        loss_mask=list(mask[response:]),
        rollout_log_probs=[math.nan] * length,
        status=Status.COMPLETED if len(tokens) == len(target.tokens) else Status.TRUNCATED,
        metadata=dict(prompt.metadata),
    )
