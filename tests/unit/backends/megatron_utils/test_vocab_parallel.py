"""Log-probs and entropies over vocabulary shards equal those of the whole vocabulary."""

import pytest
import torch

from tests.ranks import Ranks
from tests.unit.backends.megatron_utils import vocab_jobs
from tests.unit.backends.megatron_utils.vocab_jobs import HIDDEN, ROWS, inputs, weights_of


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 2], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("vocab_size", [16, 13, 6], ids=["full", "padded", "a rank of padding"])
@pytest.mark.parametrize("num_tokens", [7, 0])
def test_shards_give_what_the_whole_vocabulary_gives(
    two_ranks: Ranks, num_tokens: int, vocab_size: int, chunk_size: int, with_entropy: bool
) -> None:
    hidden, weight, targets = inputs(num_tokens, vocab_size)
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1)
    rows = [log_probs.gather(1, targets[:, None]).squeeze(1)]
    if with_entropy:
        rows.append(-(log_probs.exp() * log_probs).sum(-1))
    stats = torch.stack(rows)
    (stats * weights_of(stats)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    answers = two_ranks.run_well(
        vocab_jobs.on_shards, num_tokens, vocab_size, chunk_size, with_entropy
    )
    gradients = torch.cat([torch.tensor(a["weight"]).view(ROWS, HIDDEN) for a in answers])
    for answer in answers:
        found = torch.tensor(answer["stats"]).view_as(stats)
        torch.testing.assert_close(found, stats.detach(), atol=1e-5, rtol=0)
        found = torch.tensor(answer["hidden"]).view_as(hidden)
        torch.testing.assert_close(found, hidden.grad, atol=1e-4, rtol=0)
    torch.testing.assert_close(gradients[:vocab_size], weight.grad, atol=1e-5, rtol=0)
    assert (gradients[vocab_size:] == 0).all()
