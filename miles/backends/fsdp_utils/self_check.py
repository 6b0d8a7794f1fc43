"""Checks of a freshly loaded model, on a few tokens, against the two liberties the backend takes.

It fuses the language-model head with the log-softmax, which is right when a model's logits are its
head's output; and it packs documents into one row, which is right when no layer looks across.
"""

import torch

from miles.backends.fsdp_utils.attention import builds_packed_mask
from miles.backends.fsdp_utils.model import HeadOptions, ShardedModel
from miles.config.errors import ConfigError, Problem
from miles.contracts.types import MicroBatch
from miles.core import device, distributed, logging

_LENGTHS = (7, 5, 9)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Of log-probs (nats). Rounding stays far below, a leak between documents far above."""

log = logging.get(__name__)


def check(model: ShardedModel, *, packs: bool) -> None:
    """Check a policy or a reference, which may be of another family; collective.

    Raises ``ConfigError`` where the run ``packs`` documents and the model cannot take them so.
    """
    _check_head(model)
    if packs:
        _check_packing(model)


def _check_head(model: ShardedModel) -> None:
    """Switch the fused head off for a model that changes its logits afterwards; collective.

    Bitwise: soft-capping or scaling hardly moves the small logits of an untrained model.
    """
    logits, head_output = model.logits_and_head_output(_documents(model, _LENGTHS, packed=True))
    same = torch.equal(logits.float(), head_output.float())
    model.fuse_head = distributed.broadcast_object(same)
    if not model.fuse_head:
        log.info("%s changes its head's output: log-probs are computed unfused", _named(model))


def _check_packing(model: ShardedModel) -> None:
    """Raise ``ConfigError`` when documents of one row see each other, or a mask would be built;
    collective."""
    if device.has_accelerator() and builds_packed_mask(model.attention):
        remedy = (
            f"attention {model.attention!r} of {_named(model)} would build a"
            " mask of tokens x tokens: leave it out (padded micro-batches), or choose another"
            " --attn-implementation"
        )
        raise ConfigError([Problem("--use-dynamic-batch-size", True, remedy)])
    options = HeadOptions(temperature=1.0, chunk_size=-1)
    with torch.no_grad():
        together = model.token_stats(
            _documents(model, _LENGTHS, packed=True), options, with_entropy=False
        ).log_probs_R
        alone = model.token_stats(
            _documents(model, _LENGTHS, packed=False), options, with_entropy=False
        ).log_probs_R
    model.reshard()
    difference = (together - alone).abs().max().item()
    if distributed.broadcast_object(not difference <= _TOLERANCE[model.precision.compute]):
        remedy = (
            f"a document changes the log-probs of the next one in {_named(model)}"
            f" (by {difference:.2g}): leave it out (padded micro-batches)"
        )
        raise ConfigError([Problem("--use-dynamic-batch-size", True, remedy)])


def _named(model: ShardedModel) -> str:
    return f"{type(model.module).__name__} ({model.flag})"


def _documents(model: ShardedModel, lengths: tuple[int, ...], *, packed: bool) -> MicroBatch:
    """Documents of arbitrary tokens, every token but the first of each a response."""
    where = device.current_device()
    vocabulary = model.module.config.get_text_config().vocab_size
    total = sum(lengths)
    tokens_T = (torch.arange(total, device=where) * 7919 + 11) % vocabulary
    bounds = torch.tensor((0, *lengths), device=where).cumsum(0)
    position_ids_T = torch.cat([torch.arange(length, device=where) for length in lengths])
    target_index_R = torch.arange(total, device=where)[position_ids_T > 0]
    num_targets = len(target_index_R)
    return MicroBatch(
        tokens_T=tokens_T,
        position_ids_T=position_ids_T,
        cu_seqlens_S=bounds.int(),
        max_seqlen=max(lengths),
        logit_index_R=target_index_R - 1,
        targets_R=tokens_T[target_index_R],
        sequence_R=torch.bucketize(target_index_R, bounds[1:], right=True),
        loss_mask_R=torch.ones(num_targets, device=where),
        rollout_log_probs_R=None,
        rewards_S=torch.zeros(len(lengths), device=where),
        sample_positions=tuple(range(len(lengths))),
        packed=packed,
    )
