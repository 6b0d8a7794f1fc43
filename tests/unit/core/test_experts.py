"""Experts one by one and all in one parameter."""

import torch

from miles.core.experts import expert_slices

GATE_UP = "model.layers.3.mlp.experts.gate_up_proj"
DOWN = "model.layers.3.mlp.experts.down_proj"


def test_each_expert_has_its_gate_above_its_up() -> None:
    stored = {"model.layers.3.mlp.experts.0.gate_proj.weight"}
    slices = expert_slices(GATE_UP, (2, 6, 4), stored)
    names = [part.name.removeprefix("model.layers.3.mlp.experts.") for part in slices]
    assert names == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
        "1.up_proj.weight",
    ]
    fused = torch.arange(12.0).reshape(2, 6, 1)
    assert slices[3].of(fused)[:, 0].tolist() == [9, 10, 11]


def test_slices_are_views() -> None:
    stored = {"model.layers.3.mlp.experts.0.down_proj.weight"}
    fused = torch.zeros(2, 4, 3)
    expert_slices(DOWN, fused.shape, stored)[1].of(fused).fill_(1)
    assert fused.sum((1, 2)).tolist() == [0, 12]


def test_a_fused_checkpoint_and_other_parameters_stay_whole() -> None:
    assert expert_slices(GATE_UP, (2, 6, 4), {GATE_UP}) == ()
    stored = {"model.layers.3.mlp.experts.0.gate_proj.weight"}
    assert expert_slices("model.layers.3.mlp.gate.weight", (2, 4), stored) == ()
