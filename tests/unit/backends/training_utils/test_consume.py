import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles.backends.training_utils.consume import consume
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.algorithm import AlgorithmConfig
from miles.config.data import DataConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.contracts.types import Group, TrainStats
from miles.core.timer import Timer
from miles.rollout.batch import make_batches
from tests.unit.backends.training_utils.bigram import BigramOps, alone, joined
from tests.unit.rollout.made_samples import made_groups

RANKS = 2


def made_config(*, step: int | None = None, budget: int = 24, **flags: Any) -> MilesConfig:
    return MilesConfig(
        algorithm=AlgorithmConfig(**flags),
        data=DataConfig(
            use_dynamic_batch_size=True, max_tokens_per_gpu=budget, global_batch_size=step
        ),
        rollout=RolloutConfig(rollout_temperature=0.7),
    )


def eleven_samples() -> list[Group]:
    groups = made_groups(
        [[0, 1, 3, 2], [1, 0, 0], [5, 1, 2, 2]], [1, 9, 4, 0, 3, 12, 2, 30, 6, 6, 5]
    )
    groups[1][1].loss_mask[2:7] = [0] * 5
    groups[2][0].remove_sample = True
    return groups


def train(groups: list[Group], config: MilesConfig) -> tuple[BigramOps, TrainStats]:
    ops = BigramOps(config, alone())
    (shard,) = make_batches(groups, config, 0, 1)
    return ops, consume(ops, shard, config)


CASES: dict[str, tuple[int, MilesConfig]] = {
    "sample mean": (11, made_config(step=4)),
    "token mean": (11, made_config(step=4, calculate_per_token_loss=True, entropy_coef=0.02)),
    "whitened with KL in the reward": (
        11,
        made_config(
            step=6,
            advantage_estimator="reinforce_plus_plus",
            normalize_advantages=True,
            kl_coef=0.1,
            kl_loss_type="k3",
            gamma=0.9,
        ),
    ),
    "sequence ratio, KL loss and corrections": (
        11,
        made_config(
            step=5,
            advantage_estimator="gspo",
            use_kl_loss=True,
            kl_loss_coef=0.3,
            use_unbiased_kl=True,
            use_tis=True,
            use_opsm=True,
        ),
    ),
    "fewer samples than ranks": (1, made_config(step=4, normalize_advantages=True)),
    "supervised": (11, made_config(step=4, loss_type="sft_loss")),
}


def some_groups(number: int) -> list[Group]:
    return eleven_samples() if number == 11 else [eleven_samples()[0][:number]]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    results: dict[str, Any] = {}
    for name, (number, config) in CASES.items():
        ops = BigramOps(config, joined())
        shard = make_batches(some_groups(number), config, 0, RANKS)[rank]
        stats = consume(ops, shard, config)
        results[name] = [t.tensor for t in ops.hf_weights()], dict(stats.metrics), stats.steps
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    context: Any = mp.spawn(run_rank, args=(str(folder),), nprocs=RANKS, join=False)
    deadline = time.monotonic() + 280
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("a rank waits for another: collectives out of step")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one(case: str, rank_results: list[dict[str, Any]]) -> None:
    number, config = CASES[case]
    ops, stats = train(some_groups(number), config)
    for results in rank_results:
        weights, metrics, steps = results[case]
        for got, expected in zip(weights, ops.hf_weights(), strict=True):
            torch.testing.assert_close(got, expected.tensor, rtol=1e-4, atol=1e-5)
        for name in (n for n in stats.metrics if n.startswith("train/")):
            assert metrics[name] == pytest.approx(stats.metrics[name], rel=1e-3, abs=1e-5), name
        assert len(steps) == len(stats.steps)


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_do_not_change_the_training(case: str) -> None:
    number, config = CASES[case]
    results = []
    for budget in (1, 24, 10_000):
        data = dataclasses.replace(config.data, max_tokens_per_gpu=budget)
        ops, stats = train(some_groups(number), dataclasses.replace(config, data=data))
        results.append(([t.tensor for t in ops.hf_weights()], stats))
    for weights, stats in results[1:]:
        torch.testing.assert_close(weights, results[0][0], rtol=1e-4, atol=1e-5)
        for step, expected in zip(stats.steps, results[0][1].steps, strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)


def test_one_optimizer_step_needs_no_log_prob_pass() -> None:
    ops, _ = train(eleven_samples(), made_config())
    assert ops.log_prob_passes == []


def test_old_log_probs_are_fetched_in_one_pass_for_later_steps_only() -> None:
    config = made_config(step=4, budget=1000)
    ops, stats = train(eleven_samples(), config)
    assert ops.log_prob_passes == [("actor", 2)]
    assert [step.sums["ppo_kl"] == 0 for step in stats.steps] == [True, False, False]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_the_first_step_compares_with_its_own_log_probs(kl_coef: float) -> None:
    ops, _ = train(eleven_samples(), made_config(step=4, budget=1000, kl_coef=kl_coef))
    missing = [[batch.old_log_probs_R is None for batch in step] for step in ops.steps]
    assert missing == [[True], [False], [False]]


def test_engine_log_probs_as_old_policy_need_no_pass() -> None:
    ops, stats = train(eleven_samples(), made_config(step=4, use_rollout_logprobs=True))
    assert ops.log_prob_passes == []
    assert stats.steps[0].sums["ppo_kl"] != 0


def test_the_reference_is_asked_only_when_kl_counts() -> None:
    ops, stats = train(eleven_samples(), made_config(step=6, budget=1000, use_kl_loss=True))
    assert ops.log_prob_passes == [("ref", 2), ("actor", 1)]
    assert "train/kl_loss" in stats.metrics
    ops, stats = train(eleven_samples(), made_config(step=6, budget=1000, kl_coef=0.1))
    assert ops.log_prob_passes == [("ref", 2), ("actor", 2)]
    assert stats.steps[0].sums["ppo_kl"] == 0
    ops, stats = train(eleven_samples(), made_config())
    assert "train/kl_loss" not in stats.metrics


def test_supervised_training_runs_no_extra_pass_and_lowers_the_loss() -> None:
    ops, stats = train(eleven_samples(), made_config(step=4, loss_type="sft_loss", kl_coef=0.0))
    assert ops.log_prob_passes == []
    assert stats.steps[-1].loss < stats.steps[0].loss
    assert "train/train_rollout_logprob_abs_diff" not in stats.metrics


def test_a_policy_step_makes_rewarded_responses_likelier() -> None:
    groups = made_groups([[1, 0, 0, 0]], [6, 6, 6, 6])
    config = made_config(step=4, budget=1000)
    (shard,) = make_batches(groups, config, 0, 1)
    ops = BigramOps(config, alone())
    before = likelihoods(ops, shard, config)
    consume(ops, shard, config)
    assert likelihoods(ops, shard, config)[0] > before[0]


def likelihoods(ops: BigramOps, shard: Any, config: MilesConfig) -> list[float]:
    ((batch,),) = build_micro_batches(shard, packed=True, device=torch.device("cpu"))
    (log_probs_R,) = ops.log_probs([batch], weights="actor")
    return [log_probs_R[batch.sequence_R == s].sum().item() for s in range(batch.num_sequences)]


def test_engine_mismatch_and_times_are_reported() -> None:
    timer = Timer()
    with timer.span("wake_up"):
        pass
    config = made_config(step=4, use_kl_loss=True)
    (shard,) = make_batches(eleven_samples(), config, 0, 1)
    metrics = consume(BigramOps(config, alone()), shard, config, timer=timer).metrics
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0
    assert metrics["train/invalid_rollout_log_probs"] == 0
    assert {name for name in metrics if name.startswith("perf/")} == {
        "perf/wake_up_time",
        "perf/ref_log_probs_time",
        "perf/log_probs_time",
        "perf/advantages_time",
        "perf/optimizer_steps_time",
    }
    assert timer.take() == {}


def test_a_rollout_without_samples_takes_no_step() -> None:
    _, stats = train([], made_config())
    assert stats.steps == []
    assert stats.metrics["train/skipped_steps"] == 0


def test_a_rollout_without_trainable_tokens_changes_nothing() -> None:
    groups = made_groups([[1, 2]])
    for sample in groups[0]:
        sample.remove_sample = True
    ops, stats = train(groups, made_config(normalize_advantages=True))
    fresh = BigramOps(ops.config, alone())
    assert torch.equal(ops.head, fresh.head)
    assert stats.steps[0].loss == 0
