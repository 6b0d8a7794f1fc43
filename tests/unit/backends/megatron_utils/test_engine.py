"""Log-probs, policy training, skipped steps, precisions and sleep, on one rank and on several."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles.rollout.batch import make_batches
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils import jobs
from tests.unit.backends.fsdp_utils.jobs import (
    LENGTHS,
    as_bytes,
    from_bytes,
    make_groups,
    make_rollouts,
)
from tests.unit.backends.megatron_utils.engine_jobs import (
    log_probs_of,
    make_config,
    steps_around_a_bad_one,
    train_rollouts,
    train_with_naps,
    weights_at_start,
)
from tests.unit.backends.megatron_utils.layouts import OVERLAP, Layout, params

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True, quick=True),
    Layout(pp=2, vpp=2, quick=True),
    Layout(cp=2),
    Layout(cp=2, packed=False, quick=True),
    Layout(dp=2, flags=OVERLAP, note="overlap", quick=True),
]
POLICY = {
    "kl_coef": 0.05,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "entropy_coef": 0.01,
    "normalize_advantages": True,
    "use_tis": True,
    "ref_update_interval": 1,
    "log_probs_chunk_size": 3,
    "reset_optimizer_states": True,
}
OPTIMIZER = {"lr": 1e-3, "adam_eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5}
"""With the default epsilon, gradients that are nothing but rounding would move weights."""


def shards_of(layout: Layout, config: Any, count: int) -> Any:
    return make_rollouts(config, count, dp_size=layout.dp)


def plain_log_probs(path: Path, temperature: float) -> dict[int, list[float]]:
    """Of transformers' model, by sample index."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: dict[int, list[float]] = {}
    for sample in (s for group in make_groups(0, LENGTHS) for s in group):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[:-1] / temperature, -1)
        log_probs = log_probs.gather(1, tokens[1:, None]).squeeze(1)
        found[sample.index] = log_probs[-sample.response_length :].tolist()
    return found


@pytest.fixture(scope="module")
def dense(models: dict[str, Path]) -> Path:
    return models["dense"]


@pytest.mark.parametrize("layout", params(LAYOUTS))
def test_log_probs_are_those_of_transformers(
    megatron_ranks: Ranks, dense: Path, layout: Layout
) -> None:
    config = make_config(dense, *layout.argv, rollout={"rollout_temperature": 0.7}, **layout.groups)
    expected = plain_log_probs(dense, temperature=0.7)
    rollouts = shards_of(layout, config, 1)
    answers = megatron_ranks.run_well(log_probs_of, config, rollouts, num_ranks=layout.num_ranks)
    seen: set[int] = set()
    for answer in answers:
        seen |= answer.keys()
        for index, values in answer.items():
            assert values == pytest.approx(expected[index], abs=1e-5)
    assert seen == expected.keys()


@pytest.fixture(scope="module")
def fsdp_policy_run(megatron_ranks: Ranks, dense: Path) -> dict[str, Any]:
    config = jobs.make_config(dense, algorithm=POLICY, optimizer=OPTIMIZER)
    rollouts = make_rollouts(config, 3, dp_size=1)
    (answer,) = megatron_ranks.run_well(jobs.train_rollouts, config, rollouts, num_ranks=1)
    return answer


@pytest.mark.parametrize("layout", params(LAYOUTS))
def test_policy_training_equals_that_of_the_fsdp_backend(
    megatron_ranks: Ranks, dense: Path, fsdp_policy_run: dict[str, Any], layout: Layout
) -> None:
    """With entropy, importance weights, a reference that moves, and moments that are forgotten."""
    config = make_config(
        dense, *layout.argv, algorithm=POLICY, optimizer=OPTIMIZER, **layout.groups
    )
    rollouts = shards_of(layout, config, 3)
    answers = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=layout.num_ranks)
    for answer in answers:
        for step, other in zip(answer["steps"], fsdp_policy_run["steps"], strict=True):
            assert step.loss == pytest.approx(other.loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert step.learning_rate == other.learning_rate
        for metrics, others in zip(answer["metrics"], fsdp_policy_run["metrics"], strict=True):
            assert metrics == pytest.approx(others, rel=1e-4, abs=1e-5)
        for name, value in answer["weights"].items():
            expected = from_bytes(fsdp_policy_run["weights"][name])
            torch.testing.assert_close(from_bytes(value), expected, atol=2e-6, rtol=0, msg=name)


PADDING_LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True, quick=True),
    Layout(tp=2, note="whole sequences"),
    Layout(pp=2, vpp=2),
    Layout(cp=2, packed=False, quick=True),
]


@pytest.mark.parametrize("layout", params(PADDING_LAYOUTS))
def test_the_padding_tokens_embedding_is_trained_as_in_transformers(
    megatron_ranks: Ranks, models: dict[str, Path], layout: Layout
) -> None:
    """Its row is zero at first: what comes back through the norm behind it is a thousand times as
    large as any other gradient."""
    tied = models["tied"]
    groups = make_groups(0, LENGTHS)
    for sample in (sample for group in groups for sample in group):
        sample.tokens[::3] = [0] * len(sample.tokens[::3])
    plain = jobs.make_config(tied, optimizer=OPTIMIZER)
    (expected,) = megatron_ranks.run_well(
        jobs.train_rollouts, plain, [make_batches(groups, plain, 0, 1)], num_ranks=1
    )
    config = make_config(tied, *layout.argv, optimizer=OPTIMIZER, **layout.groups)
    rollouts = [make_batches(groups, config, 0, layout.dp)]
    answers = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=layout.num_ranks)
    for answer in answers:
        for step, other in zip(answer["steps"], expected["steps"], strict=True):
            assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        for name, value in answer["weights"].items():
            other = from_bytes(expected["weights"][name])
            torch.testing.assert_close(from_bytes(value), other, atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    "layout", params([Layout(dp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2, quick=True)])
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_changes_nothing(
    megatron_ranks: Ranks, dense: Path, layout: Layout, precision: str
) -> None:
    flags = ("--initial-loss-scale", "1024") if precision == "fp16" else ()
    config = make_config(
        dense,
        *layout.argv,
        *flags,
        precision={"fp32": precision == "fp32", "fp16": precision == "fp16"},
        **layout.groups,
    )
    rollouts = shards_of(layout, config, 1)
    answers = megatron_ranks.run_well(
        steps_around_a_bad_one, config, rollouts, num_ranks=layout.num_ranks
    )
    for answer in answers:
        good, bad, next_good = answer["seen"]
        assert [x["stats"].skipped for x in answer["seen"]] == [False, True, False]
        assert not math.isfinite(bad["stats"].grad_norm)
        assert bad["weights"] == good["weights"] != next_good["weights"]
        assert bad["state"] == good["state"] != next_good["state"]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "layout",
    params(
        [
            Layout(dp=2, flags=OVERLAP, note="overlap", quick=True),
            Layout(tp=2, pp=2, sequence_parallel=True),
        ]
    ),
)
def test_sleep_changes_no_bit_and_frees_everything(
    megatron_ranks: Ranks, dense: Path, layout: Layout, precision: str
) -> None:
    config = make_config(
        dense,
        *layout.argv,
        algorithm=POLICY,
        optimizer=OPTIMIZER,
        precision={"fp32": precision == "fp32"},
        **layout.groups,
    )
    rollouts = shards_of(layout, config, 2)
    slept = megatron_ranks.run_well(train_with_naps, config, rollouts, num_ranks=layout.num_ranks)
    awake = megatron_ranks.run_well(train_rollouts, config, rollouts, num_ranks=layout.num_ranks)
    for one, other in zip(slept, awake, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
        assert one["held"] == {0}
        assert min(one["cached"][::2]) > 0 == max(one["cached"][1::2])
        assert one["refused"] == 2
        assert all(one["same"])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="bf16", marks=pytest.mark.full),
        pytest.param(("--use-precision-aware-optimizer",), id="bf16 precision-aware"),
        pytest.param(("--initial-loss-scale", "1024"), id="fp16", marks=pytest.mark.full),
    ],
)
def test_narrow_training_follows_fp32_and_starts_from_the_checkpoints_bits(
    megatron_ranks: Ranks, models: dict[str, Path], flags: tuple[str, ...]
) -> None:
    layout = Layout(model="moe", tp=2, ep=2, sequence_parallel=True)
    model = models["moe"]

    def config(**precision: bool) -> Any:
        more = () if precision.get("fp32") else flags
        return make_config(model, *layout.argv, *more, optimizer=OPTIMIZER, precision=precision)

    rollouts = shards_of(layout, config(fp32=True), 2)
    fp16 = "--initial-loss-scale" in flags
    narrow = megatron_ranks.run_well(train_rollouts, config(fp16=fp16), rollouts, num_ranks=2)
    wide = megatron_ranks.run_well(train_rollouts, config(fp32=True), rollouts, num_ranks=2)
    for one, other in zip(narrow, wide, strict=True):
        for step, expected in zip(one["steps"], other["steps"], strict=True):
            assert not step.skipped
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    stored = load_file(model / "model.safetensors")
    for answer in megatron_ranks.run_well(weights_at_start, config(fp32=True), num_ranks=2):
        assert answer == {name: as_bytes(tensor) for name, tensor in stored.items()}


@pytest.mark.parametrize("layout", params([Layout(), Layout(tp=2, pp=2, quick=True)]))
def test_the_reference_has_its_own_directory(
    megatron_ranks: Ranks, models: dict[str, Path], dense: Path, layout: Layout
) -> None:
    config = make_config(
        dense, *layout.argv, algorithm={"use_kl_loss": True, "ref_load": str(models["other"])}
    )
    rollouts = shards_of(layout, config, 1)
    expected = plain_log_probs(models["other"], temperature=1.0)
    answers = megatron_ranks.run_well(
        log_probs_of, config, rollouts, "ref", num_ranks=layout.num_ranks
    )
    for answer in answers:
        for index, values in answer.items():
            assert values == pytest.approx(expected[index], abs=1e-5)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_every_seed_that_a_run_may_have_starts_it(
    megatron_ranks: Ranks, dense: Path, seed: int
) -> None:
    layout = Layout(pp=2)
    config = make_config(
        dense, *layout.argv, "--seed", str(seed), algorithm={"seed": seed}, **layout.groups
    )
    for answer in megatron_ranks.run_well(weights_at_start, config, num_ranks=2):
        assert answer.keys() == load_file(dense / "model.safetensors").keys()
