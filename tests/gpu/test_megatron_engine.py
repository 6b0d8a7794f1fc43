"""The Megatron backend on accelerators: a plain process's numbers, memory at work."""

from pathlib import Path

import pytest
import torch

from miles.backends.megatron_utils import cpu_platform
from miles.rollout.batch import make_batches
from scripts.made_models import make_qwen3
from tests.gpu.conftest import LayoutRanks
from tests.gpu.megatron_jobs import memory_of_a_step
from tests.unit.backends.fsdp_utils.jobs import from_bytes, make_groups, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    SUPERVISED,
    plain_training,
)
from tests.unit.backends.megatron_utils.engine_jobs import make_config, train_rollouts
from tests.unit.backends.megatron_utils.layouts import OVERLAP, RECOMPUTE, Layout
from tests.unit.backends.megatron_utils.made_models import per_expert

cpu_platform.install()
pytestmark = pytest.mark.megatron

LAYOUTS = [
    Layout(),
    Layout(packed=False),
    Layout(model="moe"),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2),
    Layout(pp=2, flags=RECOMPUTE, note="recompute"),
    Layout(model="tied", pp=2, vpp=2),
    Layout(dp=2, flags=OVERLAP, note="overlap"),
    Layout(cp=2),
    Layout(cp=2, packed=False),
    Layout(model="moe", ep=2, dp=2),
    Layout(model="moe", tp=2, ep=2, sequence_parallel=True),
    Layout(model="moe", tp=2, etp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(model="moe", tp=2, ep=2, dp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_trains_in_fp32_like_one_plain_process_on_the_cpu(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], layout: Layout
) -> None:
    config = make_config(
        megatron_models[layout.model],
        *layout.argv,
        algorithm=SUPERVISED,
        optimizer=OPTIMIZER,
        **layout.groups,
    )
    rollouts = make_rollouts(config, NUM_ROLLOUTS, dp_size=layout.dp)
    results = layout_ranks.run(layout, train_rollouts, config, rollouts)
    steps, plain = plain_training(megatron_models[layout.model])
    weights = per_expert(plain)
    for result in results:
        for step, (loss, norm, rate) in zip(result["steps"], steps, strict=True):
            assert step.loss == pytest.approx(loss, abs=1e-4)
            assert step.grad_norm == pytest.approx(norm, rel=1e-4)
            assert step.learning_rate == pytest.approx(rate, abs=1e-12)
        assert set(result["weights"]) == set(weights)
        for name, value in result["weights"].items():
            torch.testing.assert_close(
                from_bytes(value), weights[name].reshape(-1), atol=1e-4, rtol=0, msg=name
            )


def test_memory_of_a_long_packed_row_does_not_grow_with_tokens_times_vocabulary(
    layout_ranks: LayoutRanks, tmp_path: Path
) -> None:
    """128 documents of 256 tokens in one row: all logits at once would be 2.6 GB in fp32."""
    alphabet = "".join(chr(0x4E00 + i) for i in range(20_000))
    model = make_qwen3(tmp_path / "wide", alphabet=alphabet, tied=False, dtype=torch.bfloat16)
    config = make_config(
        model,
        precision={"fp32": False},
        algorithm={"log_probs_chunk_size": 256},
        data={
            "max_tokens_per_gpu": 1 << 15,
            "rollout_batch_size": 128,
            "n_samples_per_prompt": 1,
            "global_batch_size": 128,
        },
    )
    groups = make_groups(0, [(8, 248)] * 128, group_size=1)
    rollouts = [make_batches(groups, config, 0, 1)]
    (answer,) = layout_ranks.run(Layout(), memory_of_a_step, config, rollouts)
    assert answer["tokens"] == 1 << 15
    logits = answer["tokens"] * answer["vocabulary"] * 4
    assert answer["bytes"] < logits / 2
