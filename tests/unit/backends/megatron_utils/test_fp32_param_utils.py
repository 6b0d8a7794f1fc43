"""Marked parameters in a bf16 run: Qwen3.5's decay and norm, which its checkpoint has in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.made_models import make_qwen3_5
from tests.ranks import Ranks
from tests.unit.backends.megatron_utils.checkpoint_jobs import (
    WHOLE,
    as_bytes,
    load_and_report,
    make_config,
    make_rollouts,
    train_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import (
    dtypes_of,
    train_with_naps,
    weights_at_start,
)
from tests.unit.backends.megatron_utils.layouts import OVERLAP

MARKED = ("linear_attn.A_log", "linear_attn.norm.weight")
LR = 1e-5
"""A step of Adam's, which is lost on a number of 1 in bf16, whose next one is 1.0078."""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
AWARE = "--use-precision-aware-optimizer"
HOST = "--optimizer-cpu-offload --optimizer-offload-fraction 0.01"
"""The first of the marked parameters alone: they come before the others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_5(tmp_path_factory.mktemp("qwen3_5"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def stored(model: Path) -> dict[str, Tensor]:
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith(MARKED) else torch.bfloat16)
        if name.endswith(MARKED):
            assert not torch.equal(tensor, tensor.bfloat16().float())
    return weights


def bf16(model: Path, layout: str = "", lr: float = LR, **groups: dict[str, Any]) -> Any:
    optimizer = {"lr": lr, "lr_decay_style": "constant", "weight_decay": 0.0, "adam_eps": 1e-12}
    return make_config(model, layout, precision={"fp32": False}, optimizer=optimizer, **groups)


def test_megatrons_cast_leaves_marked_parameters_alone(megatron_ranks: Ranks, model: Path) -> None:
    for answer in megatron_ranks.run_well(dtypes_of, bf16(model, PP2), num_ranks=2):
        assert any(name.endswith(MARKED) for name in answer["parameters"])
        for name, dtype in answer["parameters"].items():
            assert dtype == ("torch.float32" if name.endswith(MARKED) else "torch.bfloat16"), name
        assert set(answer["optimizer"]) == {"torch.float32"}


def test_marked_parameters_reach_the_engines_in_the_checkpoints_bits(
    megatron_ranks: Ranks, model: Path, stored: dict[str, Tensor]
) -> None:
    for answer in megatron_ranks.run_well(weights_at_start, bf16(model, TP2), num_ranks=2):
        assert answer == {name: as_bytes(tensor) for name, tensor in stored.items()}


@pytest.mark.parametrize(
    "layout",
    [" ".join(OVERLAP), AWARE, f"{AWARE} {HOST}", f"{TP2} {WHOLE}"],
    ids=["sharded", "aware", "host and device", "whole"],
)
def test_the_optimizer_moves_marked_parameters_by_less_than_bf16_can_tell(
    megatron_ranks: Ranks, model: Path, stored: dict[str, Tensor], layout: str
) -> None:
    """Adam's first step is the learning rate, up or down."""
    config = bf16(model, layout, data={"global_batch_size": 6})
    rollouts = make_rollouts(config, 1, dp_size=1 if TP2 in layout else 2)
    for answer in megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=2):
        assert len(answer["steps"]) == 1
        for name in [name for name in stored if name.endswith(MARKED)]:
            dtype, data = answer["weights"][name]
            assert dtype == "torch.float32"
            moved = torch.frombuffer(bytearray(data), dtype=torch.float32) - stored[name].flatten()
            torch.testing.assert_close(moved.abs(), torch.full_like(moved, LR), atol=3e-7, rtol=0)


def test_marked_parameters_sleep_and_wake_bit_for_bit(megatron_ranks: Ranks, model: Path) -> None:
    config = bf16(model, " ".join(OVERLAP))
    rollouts = make_rollouts(config, 2, dp_size=2)
    slept = megatron_ranks.run_well(train_with_naps, config, rollouts, num_ranks=2)
    awake = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=2)
    for one, other in zip(slept, awake, strict=True):
        assert one["weights"] == other["weights"]
        assert one["held"] == {0}
        assert all(one["same"])


def test_a_checkpoint_holds_every_bit_of_marked_parameters(
    megatron_ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    config = bf16(model, TP2, checkpoint={"save": str(tmp_path)})
    rollouts = make_rollouts(config, 1, dp_size=1)
    written = megatron_ranks.run_well(train_rollouts, config, rollouts, (0,), num_ranks=2)
    resumed = bf16(model, TP2, checkpoint={"load": str(tmp_path)})
    for answer, before in zip(
        megatron_ranks.run_well(load_and_report, resumed, num_ranks=2), written, strict=True
    ):
        for part in ("weights", "optimizer", "counts"):
            assert answer[part] == before[part]


def test_another_layout_finds_the_optimizers_state_of_each_parameter(
    megatron_ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    """A step at rate 0 makes every weight what the optimizer holds of it."""
    config = bf16(model, TP2, checkpoint={"save": str(tmp_path)})
    rollouts = make_rollouts(config, 2, dp_size=1)
    written = megatron_ranks.run_well(train_rollouts, config, rollouts[:1], (0,), num_ranks=2)
    other = bf16(model, PP2, lr=0.0, checkpoint={"load": str(tmp_path)})
    for answer in megatron_ranks.run_well(train_rollouts, other, rollouts, num_ranks=2):
        assert answer["first"] == 1
        assert len(answer["steps"]) == 2
        assert answer["weights"] == written[0]["weights"]
