"""For one recorded rollout transformers, the FSDP backend and the Megatron backend agree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.config.root import MilesConfig
from miles.contracts.types import Group
from miles.rollout.batch import make_batches
from miles.rollout.debug_data import load_groups, save_groups
from scripts.made_models import make_qwen3
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils import jobs
from tests.unit.backends.megatron_utils import engine_jobs
from tests.unit.backends.parity_jobs import by_transformers, log_probs_and_training

pytestmark = pytest.mark.megatron

GROUP_SIZE, NUM_GROUPS = 4, 5
LENGTHS = [(2 + i % 4, 1 + (5 * i) % 11) for i in range(GROUP_SIZE * NUM_GROUPS)]
"""Prompt and response lengths: five optimizer steps of one group's size each."""
GRPO = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.01,
    "eps_clip": 0.02,
    "eps_clip_high": 0.04,
}
"""A range so narrow that steps after the first are clipped on both sides."""
OPTIMIZER = {"lr": 3e-3, "adam_eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5}
"""With the default epsilon, gradients that are nothing but rounding would move weights."""
DATA = {
    "rollout_batch_size": NUM_GROUPS,
    "n_samples_per_prompt": GROUP_SIZE,
    "global_batch_size": GROUP_SIZE,
}
ROWS = {
    "packed": {},
    "padded": {"use_dynamic_batch_size": False, "micro_batch_size": 2},
}
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@dataclass(frozen=True)
class Recorded:
    """Models of policy and reference, and a rollout as it is on disk."""

    policy: Path
    reference: Path
    groups: list[Group]

    def config(self, backend: str, rows: str) -> MilesConfig:
        groups: dict[str, Any] = {
            "data": {**DATA, **ROWS[rows]},
            "algorithm": {**GRPO, "ref_load": str(self.reference)},
            "optimizer": OPTIMIZER,
            "rollout": {"rollout_temperature": 0.9},
        }
        if backend == "fsdp":
            return jobs.make_config(self.policy, **groups)
        layout = TP2 if backend == "megatron-tp2" else ()
        return engine_jobs.make_config(self.policy, *layout, **groups)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("parity")
    template = str(folder / "rollout-{rollout_id}.msgpack")
    save_groups(template, 0, jobs.make_groups(0, LENGTHS, GROUP_SIZE))
    return Recorded(
        make_qwen3(folder / "policy", seed=0),
        make_qwen3(folder / "reference", seed=1),
        load_groups(template, 0),
    )


@pytest.fixture(scope="module")
def by_hand(recorded: Recorded) -> dict[str, Any]:
    """transformers and torch.optim in this process."""
    config = recorded.config("fsdp", "packed")
    (shard,) = make_batches(recorded.groups, config, 0, 1)
    return by_transformers(config, shard)


def test_the_recorded_rollout_uses_every_part_of_the_loss(by_hand: dict[str, Any]) -> None:
    metrics = by_hand["metrics"]
    assert metrics["train/pg_clipfrac"] > 0.05
    assert metrics["train/kl_loss"] > 0.01
    assert metrics["train/entropy_loss"] > 1
    assert len(by_hand["steps"]) == 5


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backend", ["fsdp", "megatron-dp2", "megatron-tp2"])
def test_a_backend_equals_transformers_on_a_recorded_rollout(
    backend: str, rows: str, recorded: Recorded, by_hand: dict[str, Any], two_ranks: Ranks
) -> None:
    config = recorded.config(backend, rows)
    dp_size = 1 if backend == "megatron-tp2" else 2
    shards = make_batches(recorded.groups, config, 0, dp_size)
    answers = two_ranks.run_well(log_probs_and_training, config, shards)
    log_probs: dict[int, list[float]] = {}
    for answer in answers:
        log_probs |= answer["log_probs"]
        assert answer["steps"] == answers[0]["steps"]
        assert answer["metrics"] == pytest.approx(by_hand["metrics"], rel=1e-4, abs=1e-5)
    assert log_probs.keys() == by_hand["log_probs"].keys()
    for index, values in log_probs.items():
        assert values == pytest.approx(by_hand["log_probs"][index], abs=1e-5)
    first, *_ = answers
    for step, expected in zip(first["steps"], by_hand["steps"], strict=True):
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert step.loss == pytest.approx(expected.loss, abs=1e-4)
