import random

import pytest

from miles.rollout.split import RankSchedule, split, steps_of


def positions(schedules: list[RankSchedule]) -> list[int]:
    return sorted(i for s in schedules for step in s for micro in step for i in micro)


def loads(schedules: list[RankSchedule], lengths: list[int], step: int) -> list[int]:
    return [sum(lengths[i] for micro in s[step] for i in micro) for s in schedules]


def made_lengths(number: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [min(4000, 5 + int(generator.lognormvariate(5.5, 1))) for _ in range(number)]


def test_the_last_step_takes_the_remainder() -> None:
    assert steps_of(7, 3) == [range(0, 3), range(3, 6), range(6, 7)]
    assert steps_of(6, 3) == [range(0, 3), range(3, 6)]
    assert steps_of(2, 3) == [range(0, 2)]
    assert steps_of(0, 3) == []


def test_206_samples_over_4_ranks() -> None:
    lengths = made_lengths(206, 0)
    schedules = split(lengths, steps_of(206, 206), 4, token_budget=4096, micro_batch_size=1)
    assert positions(schedules) == list(range(206))
    totals = loads(schedules, lengths, 0)
    assert max(totals) < 1.05 * min(totals)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("budget", [None, 4096])
def test_any_number_of_samples_gives_aligned_ranks_and_every_sample_once(
    seed: int, budget: int | None
) -> None:
    generator = random.Random(seed)
    number, ranks = generator.randint(1, 60), generator.randint(1, 9)
    size = generator.randint(1, 5)
    lengths, steps = made_lengths(number, seed), steps_of(number, generator.randint(1, 40))
    schedules = split(lengths, steps, ranks, token_budget=budget, micro_batch_size=size)
    assert len(schedules) == ranks
    assert positions(schedules) == list(range(number))
    for k, step in enumerate(steps):
        micro_batches = [schedule[k] for schedule in schedules]
        assert len({len(m) for m in micro_batches}) == 1
        flat = [micro for rank in micro_batches for micro in rank]
        assert sorted(i for micro in flat for i in micro) == list(step)
        empty = sum(not micro for micro in flat)
        assert empty == max(0, len(flat) - len(step))
        for micro in flat:
            if budget is None:
                assert len(micro) <= size
            else:
                assert len(micro) == 1 or sum(lengths[i] for i in micro) <= budget
    again = split(lengths, steps, ranks, token_budget=budget, micro_batch_size=size)
    assert again == schedules


def test_a_sample_above_the_budget_is_alone() -> None:
    schedules = split([8000, 10, 10], steps_of(3, 3), 1, token_budget=4096, micro_batch_size=1)
    assert sorted(map(sorted, schedules[0][0])) == [[0], [1, 2]]


def test_as_few_micro_batches_as_first_fit_needs() -> None:
    # Six of 600, 400: three of them fill three rows of 1,000 each.
    lengths = [600, 400, 600, 400, 600, 400]
    (schedule,) = split(lengths, steps_of(6, 6), 1, token_budget=1000, micro_batch_size=1)
    assert [sum(lengths[i] for i in micro) for micro in schedule[0]] == [1000, 1000, 1000]


def test_rows_that_only_first_fit_can_fill_stay_within_the_budget() -> None:
    # Longest-first would give 5 + 4 = 9 and 5 + 3 + 3 = 11; first-fit 5 + 5 and 4 + 3 + 3.
    lengths = [5, 5, 4, 3, 3]
    (schedule,) = split(lengths, steps_of(5, 5), 1, token_budget=10, micro_batch_size=1)
    assert sorted(sum(lengths[i] for i in micro) for micro in schedule[0]) == [10, 10]


def test_ranks_with_different_natural_counts_run_the_same_number() -> None:
    # Three rows are needed; two ranks run two each, none of them empty.
    lengths = [900, 900, 500, 400]
    schedules = split(lengths, steps_of(4, 4), 2, token_budget=1000, micro_batch_size=1)
    assert [len(s[0]) for s in schedules] == [2, 2]
    assert all(micro for s in schedules for micro in s[0])


def test_ranks_without_a_sample_get_fillers() -> None:
    schedules = split([10], steps_of(1, 8), 3, token_budget=100, micro_batch_size=1)
    assert schedules == [[[(0,)]], [[()]], [[()]]]


def test_static_micro_batches_hold_samples_of_similar_length() -> None:
    lengths = [10, 100, 11, 101]
    schedules = split(lengths, steps_of(4, 4), 2, token_budget=None, micro_batch_size=2)
    assert [schedule[0] for schedule in schedules] == [[(1, 3)], [(0, 2)]]


def test_a_rank_that_got_more_before_gets_less_next() -> None:
    # Rounds of two: 9 and 8, then 4 and 1. The totals are 10 and 12, not 13 and 9.
    lengths = [9, 8, 4, 1]
    schedules = split(lengths, steps_of(4, 4), 2, token_budget=None, micro_batch_size=1)
    assert loads(schedules, lengths, 0) == [10, 12]


def test_micro_batches_that_run_together_are_alike() -> None:
    lengths = made_lengths(400, 3)
    schedules = split(lengths, steps_of(400, 400), 4, token_budget=4096, micro_batch_size=1)
    for together in zip(*(schedule[0] for schedule in schedules), strict=True):
        tokens = [sum(lengths[i] for i in micro) for micro in together]
        assert max(tokens) < 1.1 * min(tokens)
