"""The three hooks of the Megatron backend run where they are documented."""

from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import from_bytes, make_rollouts
from tests.unit.backends.megatron_utils import made_hooks
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_with_hooks

HERE = "tests.unit.backends.megatron_utils.made_hooks"
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_hooks_run_after_initialization_and_before_log_probs_and_steps(
    megatron_ranks: Ranks, models: dict[str, Path]
) -> None:
    config = make_config(
        models["dense"],
        *TP2,
        algorithm={"use_kl_loss": True},
        hooks={
            "custom_megatron_init_path": f"{HERE}.init",
            "custom_megatron_before_log_prob_hook_path": f"{HERE}.before_log_prob",
            "custom_megatron_before_train_step_hook_path": f"{HERE}.before_step",
        },
    )
    rollouts = make_rollouts(config, 2, dp_size=1)
    for answer in megatron_ranks.run_well(train_with_hooks, config, rollouts, num_ranks=2):
        # The first step has the old policy's log-probs from its own forward pass.
        rollout = [("log-probs", 1, "ref_"), ("log-probs", 1, "")]
        assert answer["seen"] == [
            ("init", 64, 2),
            *rollout,
            ("step", 0, 0, 0),
            ("step", 0, 1, 1),
            *rollout,
            ("step", 1, 0, 2),
            ("step", 1, 1, 3),
        ]


@pytest.mark.parametrize("fp32", [True, False], ids=["fp32", "bf16"])
def test_a_hook_may_clip_the_weights(
    megatron_ranks: Ranks, models: dict[str, Path], fp32: bool
) -> None:
    config = make_config(
        models["dense"],
        *TP2,
        precision={"fp32": fp32},
        optimizer={"lr": 1e-6},
        hooks={"custom_megatron_before_train_step_hook_path": f"{HERE}.clip_weights"},
    )
    rollouts = make_rollouts(config, 1, dp_size=1)
    for answer in megatron_ranks.run_well(train_with_hooks, config, rollouts, num_ranks=2):
        largest = max(from_bytes(w).float().abs().max().item() for w in answer["weights"].values())
        assert largest == pytest.approx(made_hooks.BOUND, rel=0.01)
