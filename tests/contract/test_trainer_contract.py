"""Every training backend keeps the contract: six methods, on two ranks, with an engine."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.command_line import Foreign
from miles.config.data import DataConfig
from miles.config.fsdp import FsdpConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.precision import PrecisionConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.config.weight_sync import WeightSyncConfig
from miles.contracts.trainer import TrainRayActor
from miles.rollout.batch import make_batches
from miles.rollout.engine_set import HttpEngineSet
from tests.contract.trainer_lives import (
    first_life,
    first_rollout,
    second_life,
    uninterrupted_life,
)
from tests.engine_process import running_engine
from tests.ranks import Ranks
from tests.unit.rollout.made_samples import made_groups

OF_HOST_MEMORY = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d")
BACKENDS = [
    "fsdp",
    pytest.param("fsdp-host", marks=pytest.mark.full),
    "megatron",
    pytest.param("megatron-host", marks=pytest.mark.full),
    "megatron-tp2",
]
"""On two data-parallel ranks, the last on one whose tensors are split over two; ``host``: with
what the backend can keep in host memory there."""
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0]]
RESPONSES = [6, 3, 9, 4, 5]


def make_config(backend: str, model: Path, save: Path) -> MilesConfig:
    config = MilesConfig(
        cluster=ClusterConfig(
            train_backend=backend.partition("-")[0],  # pyright: ignore[reportArgumentType]
            colocate=True,
            distributed_timeout_minutes=2,
            actor_num_gpus_per_node=2,
        ),
        rollout=RolloutConfig(hf_checkpoint=str(model), rollout_max_response_len=16),
        data=DataConfig(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=16,
            rollout_batch_size=5,
            global_batch_size=3,
            num_rollout=3,
        ),
        optimizer=OptimizerConfig(lr=1e-3, lr_decay_style="linear"),
        precision=PrecisionConfig(fp32=True),
        fsdp=FsdpConfig(fsdp_cpu_offload=backend == "fsdp-host"),
        checkpoint=CheckpointConfig(save=str(save), load=str(save)),
        weight_sync=WeightSyncConfig(
            check_weight_update_equal=True, update_weight_buffer_size=20_000
        ),
    )
    if config.cluster.train_backend == "fsdp":
        return config
    from miles.backends.megatron_utils import arguments

    foreign = [Foreign(name=flag) for flag in OF_HOST_MEMORY if backend == "megatron-host"]
    argv, problems, _ = arguments.check(config, foreign)
    assert problems == []
    if backend == "megatron-tp2":
        argv += ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    return dataclasses.replace(config, megatron_argv=argv)


@dataclass(frozen=True)
class Lives:
    """What two ranks saw."""

    names: set[str]
    first: list[dict[str, Any]]
    second: list[dict[str, Any]]
    uninterrupted: list[dict[str, str]]


@pytest.fixture(scope="module", params=BACKENDS)
def lives(
    request: pytest.FixtureRequest,
    two_ranks: Ranks,
    tiny_qwen3: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Lives:
    folder = tmp_path_factory.mktemp(f"contract-{request.param}")
    config = make_config(request.param, tiny_qwen3, folder / "save")
    dp_size = 1 if request.param == "megatron-tp2" else 2
    groups = made_groups(REWARDS, RESPONSES)
    rollouts = [make_batches(groups, config, i, dp_size) for i in range(3)]
    with running_engine(tiny_qwen3, folder / "engine") as engine:
        engines = HttpEngineSet((engine.url,), timeout_s=60)
        first = two_ranks.run_well(first_life, config, engines, rollouts)
        second = two_ranks.run_well(second_life, config, engines, rollouts)
    alone = dataclasses.replace(config, checkpoint=CheckpointConfig())
    uninterrupted = two_ranks.run_well(uninterrupted_life, alone, rollouts)
    return Lives(set(load_file(tiny_qwen3 / "model.safetensors")), first, second, uninterrupted)


def test_a_fresh_start_begins_at_rollout_0_and_a_resumed_one_after_the_last_saved(
    lives: Lives,
) -> None:
    assert [life["first"] for life in lives.first] == [0, 0]
    assert [life["first"] for life in lives.second] == [2, 2]


def test_training_takes_every_step_and_reports_the_same_on_every_rank(lives: Lives) -> None:
    one, two = lives.first
    for stats, other in zip(one["stats"], two["stats"], strict=True):
        assert list(stats.steps) == list(other.steps)
        assert len(stats.steps) == 2
        for step in stats.steps:
            assert not step.skipped
            assert math.isfinite(step.loss)
            assert step.grad_norm > 0
        assert stats.metrics["train/loss"] == other.metrics["train/loss"]
    # Six steps in all, falling linearly.
    rates = [step.learning_rate for stats in one["stats"] for step in stats.steps]
    assert rates == pytest.approx([1e-3 * (6 - step) / 6 for step in range(4)])


def test_training_changes_every_weight(lives: Lives) -> None:
    trained, end = lives.first[0]["trained"], lives.first[0]["end"]
    assert set(trained) == lives.names
    assert all(trained[name] != end[name] for name in trained)


def test_every_rank_streams_the_same_weights(lives: Lives) -> None:
    assert lives.first[0]["end"] == lives.first[1]["end"]


def test_updates_count_up_and_the_engine_holds_the_trained_weights(lives: Lives) -> None:
    assert [life["versions"] for life in lives.first] == [[1, 2], [1, 2]]
    assert [life["version"] for life in lives.second] == [3, 3]
    (held,) = lives.first[0]["in the engines"]
    assert {name: held[name] for name in lives.first[0]["trained"]} == lives.first[0]["trained"]


def test_waking_up_restores_every_bit(lives: Lives) -> None:
    for life in lives.first:
        assert life["woken"] == life["trained"]


def test_a_forced_save_is_durable_on_return(lives: Lives) -> None:
    assert [life["tracker"] for life in lives.first] == [2, 2]


def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(lives: Lives) -> None:
    for first, second, whole in zip(lives.first, lives.second, lives.uninterrupted, strict=True):
        assert second["resumed"] == first["end"]
        assert second["end"] == whole != first["end"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_explicit_first_rollout_is_kept_without_a_tracker(
    two_ranks: Ranks, tiny_qwen3: Path, tmp_path: Path, backend: str
) -> None:
    config = make_config(backend, tiny_qwen3, tmp_path)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, start_rollout_id=5))
    assert two_ranks.run_well(first_rollout, config) == [5, 5]


def test_a_backend_that_leaves_a_method_out_cannot_be_made() -> None:
    class Incomplete(TrainRayActor):
        """Nothing of it."""

    with pytest.raises(TypeError, match="save_model"):
        Incomplete()  # pyright: ignore[reportAbstractUsage]
