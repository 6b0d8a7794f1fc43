import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from miles.backends.megatron_utils.attention import (
    CoreAttention,
    attend_share,
    rank_layout,
    rank_positions,
    zigzag_indices,
)
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils import attention_jobs
from tests.unit.backends.megatron_utils.attention_jobs import BOUNDS, SCALE, WINDOW, Case, Rotary
from tests.unit.backends.megatron_utils.layer_jobs import make_config


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], window: int | None
) -> Tensor:
    """The formula, head by head and document by document: ``[T, H, D]`` each."""
    group = query.shape[1] // key.shape[1]
    documents: list[Tensor] = []
    for start, end in itertools.pairwise(bounds):
        heads: list[Tensor] = []
        for head in range(query.shape[1]):
            q, k, v = query[start:end, head], key[start:end, head // group], value[start:end]
            scores = SCALE * q @ k.T
            for row in range(end - start):
                for column in range(end - start):
                    if column > row or (window is not None and row - column >= window):
                        scores[row, column] = -math.inf
            heads.append(torch.softmax(scores, -1) @ v[:, head // group])
        documents.append(torch.stack(heads, 1))
    return torch.cat(documents)


def plain_case(case: Case) -> dict[str, Tensor]:
    """Outputs and gradients of the formula, in Megatron's layout."""
    query, key, value, weights = (t.requires_grad_() for t in attention_jobs.tensors(case))
    window = WINDOW if case.windowed else None
    if case.packed:
        output = plain_attention(query, key, value, BOUNDS, window).flatten(1)
    else:
        rows = [
            plain_attention(query[:, b], key[:, b], value[:, b], (0, BOUNDS[-1]), window)
            for b in range(query.shape[1])
        ]
        output = torch.stack(rows, 1).flatten(2)
    gradients = torch.autograd.grad((output * weights).sum(), (query, key, value))
    return {"output": output.detach()} | dict(zip("qkv", gradients, strict=True))


CASES = [Case(packed, windowed) for packed in (False, True) for windowed in (False, True)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(
    megatron_ranks: Ranks, case: Case, num_ranks: int
) -> None:
    answers = megatron_ranks.run_well(attention_jobs.run_attention, case, num_ranks=num_ranks)
    for name, expected in plain_case(case).items():
        found = torch.full_like(expected, math.nan)
        for answer in answers:
            found[answer["positions"]] = answer[name]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_packed_row_costs_as_many_operations_for_many_documents(megatron_ranks: Ranks) -> None:
    counts: list[int] = []
    for num_documents in (3, 40):
        (found,) = megatron_ranks.run_well(
            attention_jobs.run_packed_documents, num_documents, 6, num_ranks=1
        )
        torch.testing.assert_close(found["packed"], found["alone"], atol=1e-5, rtol=1e-5)
        counts.append(found["operations"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "rotary", [Rotary(False, 1.0), Rotary(True, 1.0), Rotary(False, 0.5)], ids=str
)
def test_a_packed_row_is_rotated_as_by_megatron_document_by_document(
    megatron_ranks: Ranks, rotary: Rotary, num_ranks: int
) -> None:
    for found in megatron_ranks.run_well(
        attention_jobs.run_beside_megatron, rotary, num_ranks=num_ranks
    ):
        torch.testing.assert_close(found["ours"], found["megatrons"], atol=1e-6, rtol=1e-6)


def test_a_core_attention_of_the_users_gets_packed_rows_as_megatron_documents_them(
    megatron_ranks: Ranks,
) -> None:
    (seen,) = megatron_ranks.run_well(attention_jobs.run_with_another_core, 3, 4, num_ranks=1)
    assert seen == [[12, 4, 8], "thd"]


def test_layouts_of_past_rows_keep_no_memory_of_a_sleeping_trainer(megatron_ranks: Ranks) -> None:
    assert megatron_ranks.run_well(attention_jobs.keeps_layouts_of_rows, num_ranks=1) == [False]


def test_tokens_are_counted_within_their_document() -> None:
    bounds = torch.tensor([0, 8, 12])
    assert rank_positions(bounds, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert rank_positions(bounds, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]
    assert rank_positions(torch.tensor([0, 3, 4]), 1, 0).tolist() == [0, 1, 2, 0]


def test_a_rank_holds_a_chunk_from_each_end_of_every_document() -> None:
    bounds = torch.tensor([0, 8, 12])
    assert zigzag_indices(bounds, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices(bounds, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(torch.tensor([0, 3, 4]), 1, 0).tolist() == [0, 1, 2, 3]


def test_a_document_that_cannot_be_cut_into_equal_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[8, 6\] are not multiples of 4"):
        zigzag_indices(torch.tensor([0, 8, 14]), 2, 0)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_ranks_of_a_larger_group_share_a_packed_row(cp_size: int) -> None:
    bounds = torch.tensor([0, 8, 32, 40], dtype=torch.int32)
    torch.manual_seed(2)
    query = torch.randn(40, 4, 8)
    key, value = torch.randn(2, 40, 2, 8)
    order = torch.cat([zigzag_indices(bounds, cp_size, rank) for rank in range(cp_size)])
    assert sorted(order.tolist()) == list(range(40))
    found = torch.full_like(query, math.nan)
    for rank in range(cp_size):
        mine = zigzag_indices(bounds, cp_size, rank)
        layout = rank_layout(bounds, cp_size, rank)
        found[mine] = attend_share(query[mine], key[order], value[order], layout, SCALE, None)
    expected = plain_attention(query, key, value, bounds.tolist(), None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_every_rank_of_context_parallelism_has_the_same_work() -> None:
    bounds = torch.tensor([0, 16, 80], dtype=torch.int32)
    work = [
        sum(q * k for q, k in zip(layout.query_lengths, layout.key_lengths, strict=True))
        for layout in (rank_layout(bounds, 4, rank) for rank in range(4))
    ]
    assert len(set(work)) == 1


def make_attention(**changes: Any) -> CoreAttention:
    group: Any = object()
    collection = type("Collection", (), {"cp": group})()
    config = make_config(**changes)
    return CoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=collection)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        ({"window_size": (4, 4)}, "--window-size 4,4"),
    ],
)
def test_what_cannot_be_computed_is_refused_when_the_model_is_built(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_attention(**changes)


def test_a_mask_is_refused_because_it_would_be_ignored() -> None:
    q = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="no mask"):
        make_attention()(q, q, q, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="not no_mask"):
        make_attention()(q, q, q, attn_mask_type=AttnMaskType.no_mask)


def test_only_the_layers_that_the_config_names_have_a_window() -> None:
    assert make_attention(window_size=(3, 0)).sliding_window == 4
    assert make_attention(window_size=(3, 0), window_attn_skip_freq=[0, 1]).sliding_window is None
    assert make_attention(window_size=(-1, 0)).sliding_window is None
