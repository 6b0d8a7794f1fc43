"""Collecting on real engine servers: what races and is aborted there still adds up."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.config.root import MilesConfig
from miles.contracts.hooks import RolloutOutput
from miles.contracts.types import Sample, Status
from miles.core.hf import load_tokenizer
from miles.rollout.collect import Collector
from miles.rollout.pool import EnginePool
from tests.contract.test_weight_sync import EngineProcess, start_engines, stop
from tests.unit.rollout.scripted import ListSource, made_config


@pytest.fixture(scope="module")
def engines(
    tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EngineProcess]]:
    engines = start_engines(tiny_qwen3, tmp_path_factory.mktemp("engines"), 2)
    yield engines
    stop(engines)


def collect(
    engines: list[EngineProcess],
    config: MilesConfig,
    num_rollouts: int,
    state: dict[str, Any] | None = None,
) -> tuple[list[RolloutOutput], dict[str, Any]]:
    """So many rollouts from the start of the prompts (or from a state), and the state after."""
    tokenizer = load_tokenizer(str(config.rollout.hf_checkpoint))

    async def main() -> tuple[list[RolloutOutput], dict[str, Any]]:
        urls = [engine.url for engine in engines]
        pool = EnginePool(urls, concurrency=64, timeout_s=60.0)
        try:
            collector = Collector(config, pool, tokenizer, ListSource(tokenizer))
            first = 0
            if state is not None:
                collector.load_state_dict(state)
                first = num_rollouts
            ids = range(first, first + num_rollouts)
            return [await collector.collect(i) for i in ids], collector.state_dict()
        finally:
            await pool.close()

    return asyncio.run(main())


def samples_of(outputs: list[RolloutOutput]) -> list[Sample]:
    return [sample for output in outputs for group in output.groups for sample in group]


def log_probs_by_transformers(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor(sample.tokens)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].float()
    start = len(tokens) - sample.response_length
    scores = torch.log_softmax(logits[start - 1 : -1], dim=-1)
    return scores.gather(-1, tokens[start:, None])[:, 0]


def test_partial_rollouts_lose_no_prompt_and_log_probs_stay_those_of_the_whole(
    tiny_qwen3: Path, engines: list[EngineProcess]
) -> None:
    config = made_config(
        hf_checkpoint=str(tiny_qwen3),
        rm_type="random",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        over_sampling_batch_size=8,
        rollout_max_response_len=300,
        partial_rollout=True,
    )
    outputs, state = collect(engines, config, 4)
    samples = samples_of(outputs)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    for sample in samples:
        sample.validate()
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.response_length <= 300
        wanted = log_probs_by_transformers(model, sample)
        torch.testing.assert_close(
            torch.tensor(sample.rollout_log_probs), wanted, atol=2e-5, rtol=1e-4
        )
    assert any(len(s.weight_versions) > 1 for s in samples), "some were aborted and went on"
    used = {s.group_id for s in samples}
    waiting = [p["group_id"] for p in state["unused"]]
    waiting += [g["prompt"]["group_id"] for g in state["unfinished"]]
    assert len(used) == 8
    assert sorted([*used, *waiting]) == list(range(state["source"]["position"]))


def test_deterministic_rollouts_are_equal_bit_for_bit_also_after_a_resume(
    tiny_qwen3: Path, engines: list[EngineProcess]
) -> None:
    config = made_config(
        hf_checkpoint=str(tiny_qwen3),
        rm_type="deterministic_random",
        rollout_batch_size=3,
        n_samples_per_prompt=2,
        over_sampling_batch_size=5,
        rollout_max_response_len=24,
        deterministic_rollout=True,
    )
    whole, _ = collect(engines, config, 4)
    _, state = collect(engines, config, 2)
    resumed, _ = collect(engines, config, 2, state)
    assert samples_of(resumed) == samples_of(whole[2:])
    other_seed = replace(config, data=replace(config.data, rollout_seed=1))
    assert samples_of(collect(engines, other_seed, 1)[0]) != samples_of(whole[:1])
