from pathlib import Path

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    make_config,
    make_rollouts,
    train_rollouts,
    train_with_naps,
)


def test_sleep_frees_everything_and_changes_nothing(two_ranks: Ranks, tiny_qwen3: Path) -> None:
    config = make_config(tiny_qwen3, algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1})
    rollouts = make_rollouts(config, 3)
    undisturbed = two_ranks.run_well(train_rollouts, config, rollouts)
    for napped, plain in zip(
        two_ranks.run_well(train_with_naps, config, rollouts), undisturbed, strict=True
    ):
        assert napped["held"] == {0}
        assert napped["refused"] == 3
        assert {"exp_avg", "exp_avg_sq", "step", "weight"} <= set(napped["kinds"])
        assert napped["steps"] == plain["steps"]
        assert napped["weights"] == plain["weights"]
