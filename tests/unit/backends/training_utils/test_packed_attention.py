import math

import pytest
import torch

from miles.backends.training_utils.packed_attention import attend_end


@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 300), (300, 341), (1, 7)])
def test_the_last_tokens_of_a_row_see_what_causality_and_the_window_let_them(
    num_queries: int, num_keys: int, window: int | None
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, num_queries, 8)
    key, value = torch.randn(2, 2, 2, num_keys, 8)
    query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))

    keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = 0.3 * query @ keys.transpose(2, 3)
    for row in range(num_queries):
        position = num_keys - num_queries + row
        scores[:, :, row, position + 1 :] = -math.inf
        if window is not None:
            scores[:, :, row, : max(0, position - window + 1)] = -math.inf
    expected = (torch.softmax(scores, -1) @ values).transpose(1, 2)

    found = attend_end(query, key, value, 0.3, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    for mine, other in zip(
        torch.autograd.grad((found * weights).sum(), (query, key, value)),
        torch.autograd.grad((expected * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
