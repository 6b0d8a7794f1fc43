"""The Megatron backend on accelerators: precisions, memory, sleep, checkpoints, an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from miles.rollout.batch import make_batches
from miles.rollout.engine_set import HttpEngineSet
from scripts.made_models import make_qwen3
from tests.contract.test_trainer_contract import RESPONSES, REWARDS
from tests.contract.test_trainer_contract import make_config as make_contract_config
from tests.contract.trainer_lives import first_life, second_life
from tests.engine_process import running_engine
from tests.gpu.conftest import LayoutRanks
from tests.gpu.jobs import SEGMENTS, Place, memory_around_sleep, offload_to
from tests.gpu.megatron_jobs import memory_of_a_step, peak_of_a_start
from tests.unit.backends.fsdp_utils.jobs import from_bytes, make_groups, make_rollouts
from tests.unit.backends.fsdp_utils.test_actor import (
    OPTIMIZER,
    SUPERVISED,
)
from tests.unit.backends.fsdp_utils.test_checkpoint import SCHEDULE, saving
from tests.unit.backends.fsdp_utils.test_model import TEMPERATURE, plain_stats
from tests.unit.backends.megatron_utils import checkpoint_jobs
from tests.unit.backends.megatron_utils.engine_jobs import log_probs_of, make_config, train_rollouts
from tests.unit.backends.megatron_utils.layouts import OVERLAP, Layout
from tests.unit.rollout.made_samples import made_groups

pytestmark = pytest.mark.megatron

ONE = Layout()
TWO = [
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
]


def layouts(chosen: list[Layout]) -> Any:
    return pytest.mark.parametrize("layout", chosen, ids=str)


def largest_difference(
    layout_ranks: LayoutRanks, model: Path, layout: Layout, precision: dict[str, bool]
) -> float:
    """Of the log-probs to transformers' in fp32 on the CPU."""
    config = make_config(
        model,
        *layout.argv,
        rollout={"rollout_temperature": TEMPERATURE},
        precision=precision,
        **layout.groups,
    )
    rollouts = make_rollouts(config, 1, layout.dp)
    expected = {index: torch.tensor(values)[:, 0] for index, values in plain_stats(model).items()}
    found: dict[int, list[float]] = {}
    for answer in layout_ranks.run(layout, log_probs_of, config, rollouts):
        found |= answer
    assert found.keys() == expected.keys()
    return max((torch.tensor(found[i]) - expected[i]).abs().max().item() for i in expected)


@layouts([ONE, Layout(packed=False), *TWO])
def test_log_probs_in_fp32_equal_the_cpu(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], layout: Layout
) -> None:
    assert largest_difference(layout_ranks, megatron_models["dense"], layout, {"fp32": True}) < 1e-5


@layouts([ONE, Layout(packed=False), Layout(tp=2, sequence_parallel=True), Layout(cp=2)])
@pytest.mark.parametrize("fp16", [False, True], ids=["bf16", "fp16"])
def test_log_probs_in_half_precision_stay_near_fp32(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], layout: Layout, fp16: bool
) -> None:
    precision = {"fp32": False, "fp16": fp16}
    assert largest_difference(layout_ranks, megatron_models["dense"], layout, precision) < 0.05


@layouts([ONE, Layout(dp=2, flags=OVERLAP, note="overlapped communication"), Layout(pp=2)])
def test_bf16_training_follows_fp32(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], layout: Layout
) -> None:
    def run(fp32: bool) -> Any:
        config = make_config(
            megatron_models["dense"],
            *layout.argv,
            algorithm=SUPERVISED,
            optimizer=OPTIMIZER,
            precision={"fp32": fp32},
            **layout.groups,
        )
        return layout_ranks.run(layout, train_rollouts, config, make_rollouts(config, 2, layout.dp))

    for narrow, wide in zip(run(False), run(True), strict=True):
        for step, expected in zip(narrow["steps"], wide["steps"], strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=0.02)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "fp32"),
    [
        pytest.param(ONE, False, id="bf16"),
        pytest.param(ONE, True, id="fp32"),
        pytest.param(Layout(cp=2), False, id="bf16-cp2"),
        pytest.param(Layout(cp=2), True, id="fp32-cp2"),
    ],
)
def test_a_packed_row_costs_no_memory_that_grows_with_its_square(
    layout_ranks: LayoutRanks, tmp_path: Path, layout: Layout, fp32: bool
) -> None:
    half = 16_384
    config = make_config(
        make_qwen3(tmp_path / "model"),
        *layout.argv,
        cluster={"context_parallel_size": layout.cp},
        data={
            "max_tokens_per_gpu": 2 * half // layout.cp,
            "n_samples_per_prompt": 2,
            "rollout_batch_size": 1,
            "global_batch_size": 2,
        },
        rollout={"rollout_max_response_len": half},
        algorithm={"log_probs_chunk_size": 1024},
        precision={"fp32": fp32},
    )
    rollouts = [make_batches(make_groups(0, [(16, half - 16)] * 2), config, 0, 1)]
    for answer in layout_ranks.run(layout, memory_of_a_step, config, rollouts):
        assert answer["tokens"] == 2 * half
        # A mask of booleans alone would be a gigabyte.
        assert answer["bytes"] < (2 * half) ** 2


@layouts([ONE, Layout(dp=2), Layout(tp=2, sequence_parallel=True)])
@pytest.mark.parametrize(
    ("fp32", "where"),
    [(False, "host"), (True, "host"), (False, "disk"), (False, "streamed")],
    ids=["bf16", "fp32", "bf16, disk", "bf16, streamed"],
)
def test_sleep_gives_the_memory_back_and_waking_up_restores_every_bit(
    layout_ranks: LayoutRanks, tmp_path: Path, layout: Layout, fp32: bool, where: Place
) -> None:
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    groups = {"precision": {"fp32": fp32}, **layout.groups}
    plain = make_config(model, *layout.argv, **groups)
    offload = offload_to(where, tmp_path / "disk")
    config = make_config(model, *layout.argv, offload=offload, **groups)
    rollouts = make_rollouts(config, 2, layout.dp)
    undisturbed = layout_ranks.run(layout, train_rollouts, plain, rollouts)
    slept = layout_ranks.run(layout, memory_around_sleep, config, rollouts)
    for answer, other in zip(slept, undisturbed, strict=True):
        assert answer["unchanged"]
        for awake, asleep in zip(answer["awake"], answer["asleep"], strict=True):
            assert asleep < 0.05 * awake + SEGMENTS
        after = other["steps"][len(answer["steps"]) :]
        for step, expected in zip(answer["steps"], after, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_a_streamed_run_starts_without_room_for_masters_beside_gradients(
    layout_ranks: LayoutRanks, tmp_path: Path
) -> None:
    """2 bytes of a parameter, 2 of it in its buffer, 4 of its gradient; masters take 4 more where
    the buffers stay while they are made."""
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    offload = offload_to("streamed", tmp_path / "disk")
    config = make_config(model, offload=offload, precision={"fp32": False})
    (found,) = layout_ranks.run(ONE, peak_of_a_start, config)
    assert found["bytes"] < 9 * found["parameters"]


def test_what_megatron_keeps_of_sequence_lengths_keeps_no_memory_of_a_sleeping_trainer(
    layout_ranks: LayoutRanks, tmp_path: Path
) -> None:
    """Rotary embeddings of such lengths are larger than what PyTorch puts in small segments."""
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    config = make_config(
        model,
        data={"max_tokens_per_gpu": 20_000, "global_batch_size": 2},
        rollout={"rollout_max_response_len": 9000},
        algorithm={"log_probs_chunk_size": 1024},
        precision={"fp32": False},
    )
    lengths = [[(16, 5000), (16, 7000)], [(16, 9000), (16, 6000)]]
    rollouts = [make_batches(make_groups(n, two), config, n, 1) for n, two in enumerate(lengths)]
    (found,) = layout_ranks.run(ONE, memory_around_sleep, config, rollouts)
    for awake, asleep in zip(found["awake"], found["asleep"], strict=True):
        assert asleep < 0.05 * awake + SEGMENTS


HOST = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
BESIDE = (*HOST, "--overlap-cpu-optimizer-d2h-h2d")
PART = (*BESIDE, "--optimizer-offload-fraction", "0.5")
UNPINNED = (*BESIDE, "--no-pin-cpu-grads", "--no-pin-cpu-params")


@pytest.mark.parametrize(
    ("layout", "flags", "fp32"),
    [
        pytest.param(ONE, HOST, False, id="bf16, in turn"),
        pytest.param(ONE, HOST, True, id="fp32, in turn"),
        pytest.param(ONE, BESIDE, False, id="bf16, beside"),
        pytest.param(ONE, BESIDE, True, id="fp32, beside"),
        pytest.param(ONE, UNPINNED, True, id="fp32, unpinned"),
        pytest.param(Layout(dp=2, flags=OVERLAP), PART, False, id="bf16, in part, dp2"),
        pytest.param(Layout(dp=2, flags=OVERLAP), PART, True, id="fp32, in part, dp2"),
    ],
)
def test_an_optimizer_in_host_memory_trains_like_one_on_the_device(
    layout_ranks: LayoutRanks,
    megatron_models: dict[str, Path],
    layout: Layout,
    flags: tuple[str, ...],
    fp32: bool,
) -> None:
    def run(*more: str) -> Any:
        config = make_config(
            megatron_models["dense"],
            *layout.argv,
            *more,
            # The epsilon keeps gradients that are nothing but rounding from moving weights.
            optimizer={**OPTIMIZER, "adam_eps": 1e-4},
            precision={"fp32": fp32},
            **layout.groups,
        )
        return layout_ranks.run(layout, train_rollouts, config, make_rollouts(config, 3, layout.dp))

    tolerance = 1e-5 if fp32 else 1e-2
    for offloaded, resident in zip(run(*flags), run(), strict=True):
        for step, expected in zip(offloaded["steps"], resident["steps"], strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=tolerance)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance)
        for name, value in offloaded["weights"].items():
            torch.testing.assert_close(
                from_bytes(value).float(),
                from_bytes(resident["weights"][name]).float(),
                atol=tolerance,
                rtol=0,
                msg=name,
            )


def test_an_optimizer_in_host_memory_takes_no_device_memory_awake_or_asleep(
    layout_ranks: LayoutRanks, tmp_path: Path
) -> None:
    """bf16: 2 bytes of weight, 4 of gradient and 12 of optimizer for each parameter."""
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    resident, offloaded = (
        make_config(model, *flags, precision={"fp32": False}) for flags in ((), BESIDE)
    )
    rollouts = make_rollouts(resident, 2, 1)
    (plain,) = layout_ranks.run(ONE, memory_around_sleep, resident, rollouts)
    (found,) = layout_ranks.run(ONE, memory_around_sleep, offloaded, rollouts)
    assert found["unchanged"]
    for awake, asleep, before in zip(found["awake"], found["asleep"], plain["awake"], strict=True):
        assert awake < 0.6 * before
        assert asleep < 0.05 * awake + SEGMENTS


def test_a_checkpoint_goes_on_with_its_optimizer_on_the_device_and_back(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], tmp_path: Path
) -> None:
    resident, host = (
        make_config(megatron_models["dense"], *flags, optimizer=SCHEDULE) for flags in ((), PART)
    )
    rollouts = make_rollouts(resident, 3, 1)
    train = checkpoint_jobs.train_rollouts
    whole, *_ = layout_ranks.run(ONE, train, resident, rollouts)
    saved_host, saved_resident = (saving(c, tmp_path, async_save=True) for c in (host, resident))
    layout_ranks.run(ONE, train, saved_host, rollouts[:1], (0,))
    layout_ranks.run(ONE, train, saved_resident, rollouts[:2], (1,))
    resumed, *_ = layout_ranks.run(ONE, train, saved_host, rollouts)
    assert resumed["first"] == 2
    for name, value in resumed["weights"].items():
        expected = from_bytes(whole["weights"][name])
        torch.testing.assert_close(from_bytes(value), expected, atol=1e-5, rtol=0, msg=name)


@layouts([ONE, *TWO])
def test_a_resumed_run_goes_on_like_the_uninterrupted_one(
    layout_ranks: LayoutRanks, megatron_models: dict[str, Path], tmp_path: Path, layout: Layout
) -> None:
    config = make_config(
        megatron_models["dense"], *layout.argv, optimizer=SCHEDULE, **layout.groups
    )
    rollouts = make_rollouts(config, 3, layout.dp)
    train = checkpoint_jobs.train_rollouts
    whole, *_ = layout_ranks.run(layout, train, config, rollouts)
    config = saving(config, tmp_path)
    layout_ranks.run(layout, train, config, rollouts[:2], (1,))
    resumed, *_ = layout_ranks.run(layout, train, config, rollouts)
    assert resumed["first"] == 2
    for name, value in resumed["weights"].items():
        expected = from_bytes(whole["weights"][name])
        torch.testing.assert_close(from_bytes(value), expected, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("backend", ["megatron", "megatron-tp2"])
def test_the_contract_holds_and_an_engine_gets_the_trained_weights(
    layout_ranks: LayoutRanks, tiny_qwen3: Path, tmp_path: Path, backend: str
) -> None:
    config = make_contract_config(backend, tiny_qwen3, tmp_path / "save")
    layout = Layout(dp=2) if backend == "megatron" else Layout(tp=2)
    rollouts = [
        make_batches(made_groups(REWARDS, RESPONSES), config, i, layout.dp) for i in range(3)
    ]
    with running_engine(tiny_qwen3, tmp_path / "engine") as engine:
        engines = HttpEngineSet((engine.url,), timeout_s=60)
        first, *_ = layout_ranks.run(layout, first_life, config, engines, rollouts)
        second, *_ = layout_ranks.run(layout, second_life, config, engines, rollouts)
    assert first["versions"] == [1, 2]
    (held,) = first["in the engines"]
    assert {name: held[name] for name in first["trained"]} == first["trained"] == first["woken"]
    assert (second["first"], second["version"]) == (2, 3)
    assert second["resumed"] == first["end"]
