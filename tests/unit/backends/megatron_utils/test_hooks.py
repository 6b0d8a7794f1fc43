"""The three hooks of the Megatron backend run where they are documented, and the examples of
docs/customization.md do in a training run what they say."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils.jobs import (
    LENGTHS,
    Weights,
    from_bytes,
    make_groups,
    make_rollouts,
)
from tests.unit.backends.fsdp_utils.test_actor import SUPERVISED, negative_log_likelihood
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_with_hooks
from tests.unit.backends.megatron_utils.layouts import OVERLAP
from tests.unit.backends.megatron_utils.page_jobs import router_gradients, weights_by_rollout
from tests.unit.backends.megatron_utils.test_router import auxiliary_losses
from tests.unit.customization_page import MODULE, write_examples

HERE = "tests.unit.backends.megatron_utils.made_hooks"
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
COEFFICIENT = 1e-3
"""Of the page's auxiliary loss."""


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


def test_a_hook_before_log_probs_runs_where_a_step_would_need_no_pass_for_them(
    megatron_ranks: Ranks, models: dict[str, Path]
) -> None:
    config = make_config(
        models["dense"],
        *TP2,
        data={"global_batch_size": 6},
        hooks={"custom_megatron_before_log_prob_hook_path": f"{HERE}.before_log_prob"},
    )
    rollouts = make_rollouts(config, 2, dp_size=1)
    for answer in megatron_ranks.run_well(train_with_hooks, config, rollouts, num_ranks=2):
        assert answer["seen"] == [("log-probs", 1, ""), ("log-probs", 1, "")]


def test_hooks_see_the_same_weights_on_every_rank_while_their_gather_overlaps(
    megatron_ranks: Ranks, models: dict[str, Path]
) -> None:
    config = make_config(
        models["dense"],
        *OVERLAP,
        hooks={
            "custom_megatron_before_log_prob_hook_path": f"{HERE}.digest_before_log_prob",
            "custom_megatron_before_train_step_hook_path": f"{HERE}.digest_before_step",
        },
    )
    rollouts = make_rollouts(config, 2, dp_size=2)
    one, other = megatron_ranks.run_well(train_with_hooks, config, rollouts, num_ranks=2)
    assert one["seen"] == other["seen"]
    # Log-probs and the first step have the same weights, the second step others.
    assert len(one["seen"]) == 6
    assert len(set(one["seen"])) == 4


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-precision-aware-optimizer",),
        ("--use-precision-aware-optimizer", "--optimizer-cpu-offload"),
    ],
    ids=["device", "host"],
)
def test_weights_changed_between_steps_are_taken_over_by_an_adam_that_holds_main_weights(
    megatron_ranks: Ranks, models: dict[str, Path], flags: tuple[str, ...]
) -> None:
    config = make_config(
        models["dense"],
        *flags,
        precision={"fp32": False},
        optimizer={"lr": 1e-6},
        hooks={
            "custom_megatron_before_train_step_hook_path": f"{HERE}.halve_before_second_step",
        },
    )
    rollouts = make_rollouts(config, 1, dp_size=2)
    original = load_file(models["dense"] / "model.safetensors")
    for answer in megatron_ranks.run_well(train_with_hooks, config, rollouts, num_ranks=2):
        for name, weight in original.items():
            half = weight.bfloat16().float().reshape(-1) / 2
            found = from_bytes(answer["weights"][name]).float()
            # Two steps of at most 1e-6 each, then rounded.
            torch.testing.assert_close(found, half, rtol=0, atol=5e-6, msg=name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page's examples."""
    folder = tmp_path_factory.mktemp("page")
    write_examples(folder)
    return folder


def plain_router_gradients(model_path: Path, coefficient: float) -> list[Tensor]:
    """transformers' model in one process: one step over all samples, each a micro-batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    samples = [s for group in make_groups(0, LENGTHS) for s in group]
    num_targets = sum(sum(s.loss_mask) for s in samples)
    num_tokens = sum(len(s.tokens) for s in samples)
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        out = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
        balance = auxiliary_losses(out.router_logits)[0] * len(tokens) / num_tokens
        loss = negative_log_likelihood(out.logits[0], sample) / num_targets
        (loss + coefficient * balance).backward()
    return [layer.mlp.gate.weight.grad for layer in model.model.layers]


def test_the_example_of_an_auxiliary_loss_adds_its_gradient(
    megatron_ranks: Ranks, models: dict[str, Path], page: Path
) -> None:
    config = make_config(
        models["moe"],
        *TP2,
        *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
        algorithm=SUPERVISED,
        data={"use_dynamic_batch_size": False, "micro_batch_size": 1, "global_batch_size": 6},
        # Clipping would scale what the step leaves in the buffers.
        optimizer={"clip_grad": 0.0},
        hooks={"custom_megatron_init_path": f"{MODULE}.megatron_init"},
    )
    rollouts = make_rollouts(config, 1, dp_size=1)
    expected = plain_router_gradients(models["moe"], COEFFICIENT)
    without = plain_router_gradients(models["moe"], 0.0)
    for found in megatron_ranks.run_well(router_gradients, page, config, rollouts, num_ranks=2):
        for gradient, with_loss, without_loss in zip(found, expected, without, strict=True):
            difference = (with_loss - without_loss).abs().max().item()
            assert difference > 1e-5
            torch.testing.assert_close(gradient, with_loss, rtol=0, atol=difference / 100)


def squares(weights: Weights, name_ends: str = "") -> float:
    chosen = (from_bytes(w) for name, w in weights.items() if name.endswith(name_ends))
    return sum(float(w.double().square().sum()) for w in chosen)


def test_the_example_of_a_metric_records_the_norm_before_each_rollout(
    megatron_ranks: Ranks, models: dict[str, Path], page: Path
) -> None:
    config = make_config(
        models["dense"],
        *TP2,
        algorithm={"use_kl_loss": True},
        hooks={
            "custom_megatron_before_log_prob_hook_path": f"{MODULE}.megatron_before_log_prob",
        },
    )
    rollouts = make_rollouts(config, 2, dp_size=1)
    (weights, _) = megatron_ranks.run_well(weights_by_rollout, page, config, rollouts, num_ranks=2)
    files = [(page / f"weight_norm_{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    recorded = [[json.loads(line)["norm"] for line in lines] for lines in files]
    for one, other, before in zip(*recorded, weights[:2], strict=True):
        # Both ranks have the norms' weights and half of every other one.
        both = squares(before) + squares(before, "norm.weight")
        assert math.hypot(one, other) ** 2 == pytest.approx(both, rel=1e-6)
    assert recorded[0][0] != pytest.approx(recorded[0][1], rel=1e-6)


@pytest.fixture(scope="module")
def large(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dense`` with many weights beyond 1."""
    path = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(models["dense"], path)
    tensors = load_file(path / "model.safetensors")
    grown = {name: tensor * (1.5 if tensor.dim() == 1 else 40) for name, tensor in tensors.items()}
    save_file(grown, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("fp32", "flags"),
    [
        pytest.param(True, (), id="fp32"),
        pytest.param(False, (), id="bf16"),
        pytest.param(
            False,
            ("--use-precision-aware-optimizer", "--optimizer-cpu-offload"),
            id="bf16, host",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_example_of_clipping_keeps_every_weight_within_its_bounds(
    megatron_ranks: Ranks, large: Path, page: Path, fp32: bool, flags: tuple[str, ...]
) -> None:
    """In bf16 too, where the step starts from the optimizer's own copies."""
    config = make_config(
        large,
        *TP2,
        *flags,
        precision={"fp32": fp32},
        optimizer={"lr": 1e-6},
        hooks={
            "custom_megatron_before_train_step_hook_path": f"{MODULE}.megatron_before_train_step",
        },
    )
    rollouts = make_rollouts(config, 1, dp_size=1)
    original = load_file(large / "model.safetensors")
    assert sum(bool((w.abs() > 1).any()) for w in original.values()) == len(original)
    for _, after in megatron_ranks.run_well(
        weights_by_rollout, page, config, rollouts, num_ranks=2
    ):
        for name, weight in original.items():
            held = weight if fp32 else weight.bfloat16().float()
            # Two steps of at most 1e-6 each, then rounded.
            torch.testing.assert_close(
                from_bytes(after[name]),
                held.clamp(-1, 1).reshape(-1),
                rtol=0,
                atol=5e-6,
                msg=name,
            )
