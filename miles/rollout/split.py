"""Which rank trains which sample, in which optimizer step and micro-batch: numbers only.

Every rank gets the same steps and the same number of micro-batches in a step, because the
collectives of a micro-batch need all ranks; so the micro-batches that run at the same time are made
alike in tokens, and the totals of the ranks too.
"""

import heapq
from collections.abc import Sequence

Bin = list[int]
"""Positions of the samples of one micro-batch."""
RankSchedule = list[list[tuple[int, ...]]]
"""``[step][micro-batch]`` of one rank; an empty tuple where the rank has no sample left."""


def steps_of(num_samples: int, step_size: int) -> list[range]:
    """Consecutive runs of ``step_size`` samples; the last takes the remainder."""
    return [
        range(start, min(start + step_size, num_samples))
        for start in range(0, num_samples, step_size)
    ]


def split(
    lengths: Sequence[int],
    steps: Sequence[range],
    num_ranks: int,
    *,
    token_budget: int | None,
    micro_batch_size: int,
) -> list[RankSchedule]:
    """Give each sample to one rank and micro-batch; one schedule a rank, deterministic.

    ``lengths`` are the samples' tokens. With ``token_budget`` a micro-batch holds at most so many
    tokens (a longer sample is alone), else at most ``micro_batch_size`` samples of similar length.
    """
    ranks: list[RankSchedule] = [[] for _ in range(num_ranks)]
    for step in steps:
        if token_budget is None:
            bins = _by_length(lengths, step, micro_batch_size, num_ranks)
        else:
            bins = _by_budget(lengths, step, token_budget, num_ranks)
        for rank, micro_batches in zip(ranks, _deal(lengths, bins, num_ranks), strict=True):
            rank.append(micro_batches)
    return ranks


def _by_length(lengths: Sequence[int], step: range, size: int, num_ranks: int) -> list[Bin]:
    """Runs of the samples sorted by length, a multiple of ``num_ranks`` and equal in number."""
    order = sorted(step, key=lambda i: (-lengths[i], i))
    num_bins = _round_up(-(-len(order) // size), num_ranks)
    small, larger = divmod(len(order), num_bins)
    bins: list[Bin] = []
    start = 0
    for i in range(num_bins):
        end = start + small + (i < larger)
        bins.append(order[start:end])
        start = end
    return bins


def _by_budget(lengths: Sequence[int], step: range, budget: int, num_ranks: int) -> list[Bin]:
    """As few micro-batches as first-fit-decreasing needs, rounded up to a multiple of the ranks,
    and as equal in tokens as they can be."""
    order = sorted(step, key=lambda i: (-lengths[i], i))
    first_fit = _first_fit(lengths, order, budget)
    num_bins = _round_up(len(first_fit), num_ranks)
    balanced = _longest_first(lengths, order, num_bins)
    if all(len(b) == 1 or _tokens(lengths, b) <= budget for b in balanced if b):
        return balanced
    return _split_largest(lengths, first_fit, num_bins)


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[Bin]:
    bins: list[Bin] = []
    room: list[int] = []
    for i in order:
        chosen = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if chosen is None:
            bins.append([i])
            room.append(budget - lengths[i])
        else:
            bins[chosen].append(i)
            room[chosen] -= lengths[i]
    return bins


def _longest_first(lengths: Sequence[int], order: Sequence[int], num_bins: int) -> list[Bin]:
    """Each sample, the longest first, to the bin with the fewest tokens."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in order:
        tokens, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (tokens + lengths[i], b))
    return bins


def _split_largest(lengths: Sequence[int], bins: list[Bin], num_bins: int) -> list[Bin]:
    """Halve the bins with the most tokens that can be halved; then fill up with empty ones."""
    whole = [b for b in bins if len(b) == 1]
    heap = [(-_tokens(lengths, b), b[0], b) for b in bins if len(b) > 1]
    heapq.heapify(heap)
    while heap and len(whole) + len(heap) < num_bins:
        _, _, largest = heapq.heappop(heap)
        for half in _longest_first(lengths, largest, 2):
            if len(half) == 1:
                whole.append(half)
            else:
                heapq.heappush(heap, (-_tokens(lengths, half), half[0], half))
    result = whole + [b for _, _, b in heap]
    return result + [[] for _ in range(num_bins - len(result))]


def _deal(lengths: Sequence[int], bins: list[Bin], num_ranks: int) -> list[list[tuple[int, ...]]]:
    """Deal the bins out, the ``num_ranks`` largest first: they run at the same time. Of each such
    round the rank with the fewest tokens so far gets the largest."""
    ordered = sorted(bins, key=lambda b: (-_tokens(lengths, b), b))
    hands: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(ordered), num_ranks):
        by_load = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(by_load, ordered[start : start + num_ranks], strict=True):
            hands[rank].append(tuple(sorted(chosen)))
            totals[rank] += _tokens(lengths, chosen)
    return hands


def _tokens(lengths: Sequence[int], chosen: Bin) -> int:
    return sum(lengths[i] for i in chosen)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
