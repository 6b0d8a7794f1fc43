"""Qwen3.5, whose delta nets are transformers' modules, computes what transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import LENGTHS, make_groups, make_rollouts
from tests.unit.backends.megatron_utils.engine_jobs import log_probs_of, make_config
from tests.unit.backends.megatron_utils.layouts import Layout

LAYOUTS = [
    Layout(model="qwen3_5"),
    Layout(model="qwen3_5", packed=False),
    Layout(model="qwen3_5", tp=2),
    Layout(model="qwen3_5", tp=2, sequence_parallel=True),
    Layout(model="qwen3_5", tp=2, sequence_parallel=True, packed=False),
    Layout(model="qwen3_5", pp=2),
    Layout(model="qwen3_5", cp=2),
    Layout(model="qwen3_5", cp=2, packed=False),
]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[int, list[float]]:
    """Log-probs of each sample alone, in fp32."""
    path = models["qwen3_5"]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: dict[int, list[float]] = {}
    for sample in (s for group in make_groups(0, LENGTHS) for s in group):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0]
        found[sample.index] = log_probs[-sample.response_length :].tolist()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_are_those_of_transformers(
    megatron_ranks: Ranks,
    models: dict[str, Path],
    expected: dict[int, list[float]],
    layout: Layout,
) -> None:
    config = make_config(models["qwen3_5"], *layout.argv, **layout.groups)
    rollouts = make_rollouts(config, 1, dp_size=1)
    for answer in megatron_ranks.run_well(
        log_probs_of, config, rollouts, num_ranks=layout.num_ranks
    ):
        assert answer.keys() == expected.keys()
        for index, values in answer.items():
            assert values == pytest.approx(expected[index], abs=1e-5)
