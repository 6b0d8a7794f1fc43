"""Sampling against distributions worked out by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.embedded.sampling import (
    SamplingRows,
    inverse_cdf,
    keep_top,
    sample,
    uniform,
)


def rows(count: int, **given: Any) -> SamplingRows:
    """The same settings for ``count`` rows with seeds 0, 1, 2, ..."""
    return SamplingRows(
        temperature=np.full(count, given.get("temperature", 1.0), np.float32),
        top_p=np.full(count, given.get("top_p", 1.0), np.float32),
        top_k=np.full(count, given.get("top_k", -1), np.int64),
        seed=np.arange(count, dtype=np.uint64),
        position=np.zeros(count, np.int64),
    )


def frequencies(probs: list[float], count: int = 40_000, **given: Any) -> list[float]:
    logits = torch.tensor(probs).log().expand(count, -1)
    tokens, _ = sample(logits, rows(count, **given))
    return (torch.bincount(tokens, minlength=len(probs)) / count).tolist()


def test_tokens_are_drawn_with_their_probabilities() -> None:
    assert frequencies([0.5, 0.3, 0.2]) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_a_low_temperature_sharpens_the_distribution() -> None:
    # Temperature 0.5 squares the probabilities: 0.25, 0.09, 0.04 over 0.38.
    expected = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    assert frequencies([0.5, 0.3, 0.2], temperature=0.5) == pytest.approx(expected, abs=0.01)


def test_top_k_renormalises_what_it_keeps() -> None:
    assert frequencies([0.5, 0.3, 0.2], top_k=2) == pytest.approx([0.625, 0.375, 0], abs=0.01)


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    assert frequencies([0.5, 0.3, 0.2], top_p=0.6) == pytest.approx([0.625, 0.375, 0], abs=0.01)
    assert frequencies([0.5, 0.3, 0.2], top_p=0.4) == [1, 0, 0]


def test_top_p_is_judged_on_the_distribution_before_top_k() -> None:
    # Of 0.4 0.3 0.2 0.1, top-k 3 leaves three; the mass before the third is 0.7 < 0.75, so top-p
    # keeps it too. Renormalised first it would be 0.7 / 0.9 > 0.75 and be dropped.
    kept = keep_top(
        torch.tensor([[0.4, 0.3, 0.2, 0.1]]), np.array([0.75], np.float32), np.array([3])
    )
    assert kept[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0])


def test_top_p_looks_beyond_the_most_probable_thousand_when_it_must() -> None:
    probs = torch.full((1, 5000), 1 / 5000)
    kept = keep_top(probs, np.array([0.5], np.float32), np.array([-1]))
    assert int((kept > 0).sum()) == pytest.approx(2500, abs=1)


def test_log_probs_are_of_the_temperature_scaled_softmax_before_filtering() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    _, log_probs = sample(logits, rows(1, temperature=0.6, top_k=1))
    expected = torch.log_softmax(torch.tensor([1.0, 2.0, 0.5]) / 0.6, -1)[1]
    assert log_probs[0].item() == pytest.approx(expected.item(), abs=1e-6)


def test_greedy_takes_the_maximum_and_reports_log_probs_at_temperature_1() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    tokens, log_probs = sample(logits, rows(1, temperature=0.0))
    assert tokens.tolist() == [1]
    assert log_probs[0].item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    mixed = rows(2)
    mixed.temperature[0] = 0
    logits = torch.tensor([[1.0, 1.5], [-30.0, 30.0]])
    assert sample(logits, mixed)[0].tolist() == [1, 1]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    together = sample(logits, rows(64))[0]
    for row in (0, 17, 63):
        alone = SamplingRows(
            temperature=np.ones(1, np.float32),
            top_p=np.ones(1, np.float32),
            top_k=np.full(1, -1),
            seed=np.array([row], np.uint64),
            position=np.zeros(1, np.int64),
        )
        assert sample(logits[row : row + 1], alone)[0].item() == together[row].item()


def test_uniform_numbers_are_spread_over_seeds_and_positions() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    by_seed = uniform(seeds, np.zeros(20_000, np.int64))
    by_position = uniform(np.zeros(20_000, np.uint64), np.arange(20_000))
    for draws in (by_seed, by_position):
        assert draws.min() >= 0
        assert draws.max() < 1
        assert np.histogram(draws, 10, (0, 1))[0] == pytest.approx([2000] * 10, abs=200)
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.03


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1000])
def test_the_inverse_cdf_finds_the_interval_of_each_draw(vocabulary: int) -> None:
    probs = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(1)) + 0.1
    cumulated = probs.double().cumsum(-1)[0]
    total = float(cumulated[-1])
    middles = (cumulated - probs.double()[0] / 2) / total
    tokens = inverse_cdf(probs.expand(vocabulary, -1).contiguous(), middles)
    assert tokens.tolist() == list(range(vocabulary))


def test_tokens_of_probability_0_are_never_chosen() -> None:
    probs = torch.zeros(4, 700)
    probs[:, 300] = 0.3
    probs[:, 655] = 0.7
    draws = torch.tensor([0.0, 0.299999, 0.300001, 1 - 2.0**-52], dtype=torch.float64)
    assert inverse_cdf(probs, draws).tolist() == [300, 300, 655, 655]


def test_logits_that_are_not_finite_give_a_log_prob_that_is_not() -> None:
    logits = torch.zeros(3, 600)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    _, log_probs = sample(logits, rows(3))
    assert log_probs.isfinite().tolist() == [False, False, True]
