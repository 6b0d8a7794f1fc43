"""Rows, the waiting queue, slot planning and the admission gate."""

from typing import Any

import numpy as np
import pytest

from miles.backends.embedded.admission import Admission
from miles.backends.embedded.protocol import Refused, Sampling
from miles.backends.embedded.requests import Request
from miles.backends.embedded.rows import Rows
from miles.backends.embedded.waiting import Limits, Waiting, plan_slots


def request(
    rid: str = "r",
    prompt: int = 4,
    admission: tuple[str, int, int] | None = None,
    stop: tuple[int, ...] = (1,),
    **params: Any,
) -> Request:
    return Request(
        rid=rid,
        input_ids=list(range(prompt)),
        params=Sampling(**params),
        stop_token_ids=stop,
        deliver=lambda request, error: None,
        admission=admission,
    )


def append(rows: Rows, tokens: list[int], version: int = 0) -> None:
    rows.append(np.array(tokens), -np.array(tokens, np.float32), version)


def test_a_row_stops_at_its_own_stop_tokens_and_its_own_limit() -> None:
    rows = Rows(8)
    rows.add(request(stop=(1, 7), max_new_tokens=3).sequences, 4)
    rows.add(request(stop=(1,), max_new_tokens=2).sequences, 4)
    rows.add(request(stop=(), max_new_tokens=9).sequences, 4)
    append(rows, [7, 7, 7])
    assert rows.stopped().tolist() == [True, False, False]
    append(rows, [2, 1, 1])
    assert rows.stopped().tolist() == [False, True, False]
    assert rows.full().tolist() == [False, True, False]


def test_removing_rows_closes_holes_and_says_which_slots_moved() -> None:
    rows = Rows(8)
    sequences = request(n=5, max_new_tokens=50).sequences
    rows.add(sequences, 4)
    for step in range(20):
        append(rows, [10 * row + step for row in range(5)])
    source, target = rows.remove(np.array([0, 2, 4]))
    assert (source.tolist(), target.tolist()) == ([3], [0])
    assert rows.sequences == [sequences[3], sequences[1]]
    assert rows.save(0).output_ids == [30 + step for step in range(20)]
    assert rows.save(1).log_probs == [-10.0 - step for step in range(20)]
    assert rows.last_tokens.tolist() == [49, 29]


def test_a_sequence_that_comes_back_goes_on_where_it_was() -> None:
    rows = Rows(4)
    (sequence,) = request(max_new_tokens=40).sequences
    rows.add([sequence], 4)
    for step in range(20):
        append(rows, [step], version=3)
    rows.save(0)
    rows.remove(np.array([0]))
    assert len(sequence.tokens) == 24
    assert sequence.weight_version == 3
    rows.add([sequence], 24)
    assert rows.sampling().position.tolist() == [20]
    append(rows, [99], version=4)
    assert rows.save(0).output_ids == [*range(20), 99]
    assert sequence.weight_version == 4


def test_the_samples_of_a_request_have_distinct_seeds_and_the_first_has_the_given_one() -> None:
    seeds = [s.seed for s in request(n=4, sampling_seed=11).sequences]
    assert seeds[0] == 11
    assert len(set(seeds)) == 4
    assert [s.seed for s in request(n=2, sampling_seeds=[5, -1]).sequences] == [5, 2**64 - 1]
    unseeded = {request().sequences[0].seed for _ in range(20)}
    assert len(unseeded) == 20


LIMITS = Limits(max_rows=8, max_total_tokens=200, context_length=100)


def test_prompts_are_admitted_in_order_until_rows_run_out() -> None:
    waiting, rows = Waiting(LIMITS), Rows(8)
    for n in (4, 3, 2, 1):
        waiting.push(request(n=n, max_new_tokens=4))
    prompts = waiting.admit(rows)
    assert [(p.slot, p.num_slots) for p in prompts] == [(0, 4), (4, 3)]
    assert waiting.num_sequences == 3  # the single one does not overtake
    rows.remove(np.arange(7))
    assert [(p.slot, p.num_slots) for p in waiting.admit(rows)] == [(0, 2), (2, 1)]
    assert not waiting


def test_a_request_of_more_samples_than_rows_is_run_in_parts() -> None:
    waiting, rows = Waiting(LIMITS), Rows(8)
    waiting.push(request(n=19, max_new_tokens=4))
    sizes: list[int] = []
    while waiting:
        sizes += [p.num_slots for p in waiting.admit(rows)]
        rows.remove(np.arange(len(rows)))
    assert sizes == [8, 8, 3]


def test_the_cache_limit_counts_every_row_at_the_longest() -> None:
    waiting, rows = Waiting(LIMITS), Rows(8)
    waiting.push(request(n=4, max_new_tokens=6))  # 4 rows of 10
    waiting.push(request(n=1, max_new_tokens=36))  # 5 rows of 40 = 200: fits
    waiting.push(request(n=1, max_new_tokens=6))  # 6 rows of 40: does not
    assert [p.slot for p in waiting.admit(rows)] == [0, 4]
    assert waiting.num_sequences == 1


def filled(num_rows: int, max_length: int) -> Rows:
    rows = Rows(256)
    sequences = request(n=num_rows, prompt=1, max_new_tokens=max_length - 1).sequences
    rows.add(sequences, 1)
    return rows


def test_slots_grow_in_large_steps_and_do_not_shrink() -> None:
    limits = Limits(max_rows=256, max_total_tokens=100_000, context_length=1000)
    assert plan_slots((0, 0), filled(5, 300), 40, limits) == (8, 64)
    assert plan_slots((8, 64), filled(3, 300), 10, limits) == (8, 64)
    assert plan_slots((8, 64), filled(9, 300), 10, limits) == (16, 64)
    assert plan_slots((8, 64), filled(3, 300), 65, limits) == (8, 96)
    assert plan_slots((8, 128), filled(3, 300), 129, limits) == (8, 192)
    assert plan_slots((8, 256), filled(3, 300), 257, limits) == (8, 320)  # never over the need


def test_slots_keep_the_limit_on_tokens() -> None:
    limits = Limits(max_rows=256, max_total_tokens=100_000, context_length=1000)
    assert plan_slots((256, 320), filled(2, 990), 900, limits) == (2, 928)
    assert plan_slots((128, 700), filled(101, 990), 760, limits) == (101, 990)


def test_an_admission_key_opens_in_order_when_all_its_requests_are_there() -> None:
    gate = Admission(timeout_s=10)
    requests = {i: request(f"r{i}", admission=("k", i, 3)) for i in (2, 0, 1)}
    assert gate.enter(requests[2], 0.0) == []
    assert gate.enter(requests[0], 0.0) == []
    other = request("other")
    assert gate.enter(other, 0.0) == [other]
    assert gate.enter(requests[1], 0.0) == [requests[0], requests[1], requests[2]]
    assert len(gate) == 0
    assert gate.deadline is None


def test_an_incomplete_admission_key_expires_and_names_what_is_missing() -> None:
    gate = Admission(timeout_s=10)
    waiting = request(admission=("k", 1, 3))
    gate.enter(waiting, 5.0)
    assert gate.deadline == 15.0
    assert gate.expire(14.9) == []
    ((expired, error),) = gate.expire(15.0)
    assert expired is waiting
    assert "2 of 3 requests did not come within 10 s (positions 0, 2)" in str(error)
    assert gate.deadline is None


def test_a_position_cannot_be_taken_twice_nor_the_count_change() -> None:
    gate = Admission(timeout_s=10)
    gate.enter(request("a", admission=("k", 1, 3)), 0.0)
    for admission in (("k", 1, 3), ("k", 2, 4)):
        with pytest.raises(Refused, match="count 3"):
            gate.enter(request("b", admission=admission), 0.0)
    assert len(gate) == 1
