"""What test_vocab_parallel.py runs on two ranks."""

from typing import Any

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.vocab_parallel import VocabShard, token_stats
from miles.core import distributed

HIDDEN, ROWS = 5, 8


def inputs(num_tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the whole head, targets."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = 3 * torch.randn(vocab_size, HIDDEN, generator=generator)
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, targets


def weights_of(stats: torch.Tensor) -> torch.Tensor:
    """What the loss weighs each number with."""
    return torch.linspace(-1, 2, stats.numel()).view_as(stats)


def on_shards(
    num_tokens: int, vocab_size: int, chunk_size: int, with_entropy: bool
) -> dict[str, Any]:
    """Statistics and gradients of the whole problem, from this rank's rows of the head."""
    distributed.init_process_group(1)
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, targets = inputs(num_tokens, vocab_size)
    padded = torch.full((ROWS * group.size(), HIDDEN), 100.0)
    padded[:vocab_size] = weight
    mine = padded[ROWS * group.rank() :][:ROWS].clone().requires_grad_()
    hidden.requires_grad_()
    shard = VocabShard.of(vocab_size, ROWS, group)
    log_probs, entropy = token_stats(
        hidden,
        mine,
        targets,
        shard,
        temperature=0.7,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
    )
    stats = torch.stack([log_probs] if entropy is None else [log_probs, entropy])
    (stats * weights_of(stats)).sum().backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    dist.all_reduce(hidden.grad)
    return {
        "stats": stats.detach().tolist(),
        "hidden": hidden.grad.tolist(),
        "weight": mine.grad.tolist(),
    }
