from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from miles.backends.training_utils import logprobs
from miles.backends.training_utils.logprobs import token_stats
from miles.backends.training_utils.logprobs import token_stats_from_logits as from_logits

R, H, V = 13, 8, 50
TEMPERATURE = 0.6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((R, H), (V, H), (V,))
    )
    return hidden, weight, bias, torch.randint(V, (R,), generator=generator)


def upstream() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(R, generator=generator), torch.randn(R, generator=generator)


def reference() -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients (hidden, weight, bias) from plain float64 operations."""
    hidden, weight, bias, targets = inputs(torch.float64)
    log_probs_RxV = torch.log_softmax((hidden @ weight.T + bias) / TEMPERATURE, dim=-1)
    values = [
        log_probs_RxV[torch.arange(R), targets],
        torch.distributions.Categorical(logits=log_probs_RxV).entropy(),
    ]
    sum((value * grad).sum() for value, grad in zip(values, upstream(), strict=True)).backward()
    return values, [t.grad for t in (hidden, weight, bias) if t.grad is not None]


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 13, 1000])
def test_fused_values_and_gradients_equal_plain_float64(chunk_size: int) -> None:
    hidden, weight, bias, targets = inputs()
    stats = token_stats(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=TEMPERATURE,
        chunk_size=chunk_size,
        with_entropy=True,
    )
    values, gradients = reference()
    grad_log_probs, grad_entropy = upstream()
    assert stats.entropy_R is not None
    torch.testing.assert_close(stats.log_probs_R.double(), values[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy_R.double(), values[1], rtol=1e-5, atol=1e-5)
    ((stats.log_probs_R * grad_log_probs).sum() + (stats.entropy_R * grad_entropy).sum()).backward()
    for tensor, expected in zip((hidden, weight, bias), gradients, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk_size", [-1, 4])
def test_values_and_gradients_from_logits_equal_plain_float64(chunk_size: int) -> None:
    hidden, weight, bias, targets = inputs()
    logits = hidden @ weight.T + bias
    stats = from_logits(
        logits, targets, temperature=TEMPERATURE, chunk_size=chunk_size, with_entropy=True
    )
    values, gradients = reference()
    grad_log_probs, grad_entropy = upstream()
    assert stats.entropy_R is not None
    torch.testing.assert_close(stats.log_probs_R.double(), values[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy_R.double(), values[1], rtol=1e-5, atol=1e-5)
    ((stats.log_probs_R * grad_log_probs).sum() + (stats.entropy_R * grad_entropy).sum()).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), gradients[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk_size", [-1, 4])
def test_only_the_entropy_may_be_trained(chunk_size: int) -> None:
    hidden, weight, _, targets = inputs()
    stats = token_stats(
        hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, with_entropy=True
    )
    assert stats.entropy_R is not None
    stats.entropy_R.sum().backward()
    plain, _, _, _ = inputs()
    torch.distributions.Categorical(logits=plain @ weight.detach().T).entropy().sum().backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_temperature_divides_the_logits() -> None:
    # Logits 0 and ln 4: probabilities 1/5 and 4/5; at temperature 0.5 they are 1/17 and 16/17.
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [4.0]]).clamp(min=1).log()
    for temperature, probability in ((1.0, 4 / 5), (0.5, 16 / 17)):
        stats = token_stats(
            hidden,
            weight,
            torch.tensor([1]),
            temperature=temperature,
            chunk_size=-1,
            with_entropy=False,
        )
        assert stats.log_probs_R.exp().item() == pytest.approx(probability)
        assert stats.entropy_R is None


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens_still_give_every_input_a_zero_gradient(with_entropy: bool) -> None:
    hidden, weight, bias, targets = inputs()
    stats = token_stats(
        hidden[:0],
        weight,
        targets[:0],
        bias=bias,
        temperature=1.0,
        chunk_size=-1,
        with_entropy=with_entropy,
    )
    assert stats.log_probs_R.shape == (0,)
    stats.log_probs_R.sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() == 0


@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_bf16_inputs_give_float32_statistics_and_bf16_gradients(chunk_size: int) -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    stats = token_stats(
        hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, with_entropy=False
    )
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)[torch.arange(R), targets]
    assert stats.log_probs_R.dtype == torch.float32
    torch.testing.assert_close(stats.log_probs_R.double(), exact, rtol=0.02, atol=0.05)
    stats.log_probs_R.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_an_impossible_token_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    stats = from_logits(
        logits, torch.tensor([0]), temperature=1.0, chunk_size=-1, with_entropy=True
    )
    assert stats.entropy_R is not None
    assert stats.entropy_R.item() == pytest.approx(torch.tensor(2.0).log().item())


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned in float32."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    tokens, vocabulary, chunk = 256, 512, 16
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    with LargestTensor() as largest:
        stats = token_stats(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.int64),
            temperature=0.6,
            chunk_size=chunk,
            with_entropy=True,
        )
        assert stats.entropy_R is not None
        (stats.log_probs_R.sum() + stats.entropy_R.sum()).backward()
    assert hidden.grad is not None
    assert largest.elements == chunk * vocabulary


def test_logits_that_exist_already_are_widened_a_chunk_at_a_time() -> None:
    tokens, vocabulary, chunk = 64, 128, 8
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    with LargestTensor() as largest:
        stats = from_logits(
            logits,
            torch.zeros(tokens, dtype=torch.int64),
            temperature=0.6,
            chunk_size=chunk,
            with_entropy=True,
        )
        assert stats.entropy_R is not None
        (stats.log_probs_R.sum() + stats.entropy_R.sum()).backward()
    assert logits.grad is not None
    assert largest.elements == chunk * vocabulary


def test_the_chosen_chunk_keeps_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", 1000)
    with LargestTensor() as largest:
        stats = token_stats(
            torch.zeros(9, 1),
            torch.zeros(300, 1),
            torch.zeros(9, dtype=torch.int64),
            temperature=1.0,
            chunk_size=-1,
            with_entropy=False,
        )
    assert largest.elements == 3 * 300
    torch.testing.assert_close(stats.log_probs_R, -torch.full((9,), 300.0).log())
