"""The FSDP backend on accelerators: the same numbers as on a CPU, and what only a device shows."""

from datetime import timedelta
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
from tests.gpu.conftest import DeviceRanks
from tests.gpu.jobs import (
    SEGMENTS,
    Place,
    memory_after_a_step,
    memory_around_sleep,
    memory_of_a_step,
    offload_to,
)
from tests.unit.backends.fsdp_utils.jobs import (
    from_bytes,
    load_and_report,
    log_probs_of,
    make_config,
    make_groups,
    make_rollouts,
    save_in_background,
    time_outs_of_groups,
    train_rollouts,
)
from tests.unit.backends.fsdp_utils.made_families import make_listed_experts
from tests.unit.backends.fsdp_utils.test_actor import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    SUPERVISED,
    assert_like_plain,
    plain_training,
)
from tests.unit.backends.fsdp_utils.test_checkpoint import SCHEDULE, saving
from tests.unit.backends.fsdp_utils.test_model import PADDED, TEMPERATURE, plain_stats
from tests.unit.rollout.made_samples import made_groups

LAYOUTS = pytest.mark.parametrize("data", [{}, PADDED], ids=["packed", "padded"])


def stats_on_device(
    device_ranks: DeviceRanks, model: Path, data: dict[str, Any], **precision: Any
) -> dict[int, list[tuple[float, float]]]:
    """Log-probs and entropies by sample, gathered from the ranks."""
    rollout = {"rollout_temperature": TEMPERATURE}
    config = make_config(model, data=data, rollout=rollout, precision=precision)
    rollouts = make_rollouts(config, 1, device_ranks.size)
    found: dict[int, list[tuple[float, float]]] = {}
    for answer in device_ranks.run(log_probs_of, config, rollouts):
        found |= answer["stats"]
    return found


def largest_difference(found: dict[int, Any], plain: dict[int, Any]) -> float:
    assert set(found) == set(plain)
    return max((torch.tensor(found[i]) - torch.tensor(plain[i])).abs().max().item() for i in plain)


@LAYOUTS
def test_log_probs_in_fp32_equal_the_cpu(
    device_ranks: DeviceRanks, tiny_qwen3: Path, data: dict[str, Any]
) -> None:
    found = stats_on_device(device_ranks, tiny_qwen3, data)
    assert largest_difference(found, plain_stats(tiny_qwen3)) < 1e-5


@LAYOUTS
@pytest.mark.parametrize("fp16", [False, True], ids=["bf16", "fp16"])
def test_log_probs_in_half_precision_stay_near_fp32(
    device_ranks: DeviceRanks, tiny_qwen3: Path, data: dict[str, Any], fp16: bool
) -> None:
    found = stats_on_device(device_ranks, tiny_qwen3, data, fp32=False, fp16=fp16)
    assert largest_difference(found, plain_stats(tiny_qwen3)) < 0.05


@pytest.mark.parametrize(
    ("data", "fsdp"),
    [
        ({}, {}),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 2}, {}),
        ({}, {"gradient_checkpointing": True}),
        ({}, {"fsdp_cpu_offload": True}),
        ({}, {"fsdp_cpu_offload": True, "gradient_checkpointing": True}),
    ],
    ids=["packed", "padded", "recomputed", "shards in host memory", "both"],
)
def test_ranks_train_in_fp32_like_one_plain_process_on_the_cpu(
    device_ranks: DeviceRanks, tiny_qwen3: Path, data: dict[str, Any], fsdp: dict[str, Any]
) -> None:
    config = make_config(
        tiny_qwen3, algorithm=SUPERVISED, optimizer=OPTIMIZER, data=data, fsdp=fsdp
    )
    rollouts = make_rollouts(config, NUM_ROLLOUTS, device_ranks.size)
    plain = plain_training(tiny_qwen3)
    for result in device_ranks.run(train_rollouts, config, rollouts):
        assert_like_plain(result, plain)


@pytest.mark.parametrize(
    "fsdp",
    [{}, {"accumulate_sharded_gradients": True}, {"fsdp_cpu_offload": True}],
    ids=["whole gradients", "sharded gradients", "shards in host memory"],
)
def test_parameters_that_only_some_ranks_use_train_like_one_plain_process_on_the_cpu(
    device_ranks: DeviceRanks, tmp_path: Path, fsdp: dict[str, Any]
) -> None:
    model = make_listed_experts(tmp_path, num_experts=24)
    config = make_config(
        model,
        algorithm=SUPERVISED,
        optimizer=OPTIMIZER,
        data={"max_tokens_per_gpu": 20},
        fsdp=fsdp,
    )
    plain = plain_training(model)
    rollouts = make_rollouts(config, NUM_ROLLOUTS, device_ranks.size)
    for result in device_ranks.run(train_rollouts, config, rollouts):
        assert_like_plain(result, plain)


def test_every_group_of_a_mesh_waits_as_long_as_the_flag_says(device_ranks: DeviceRanks) -> None:
    """NCCL's too; a replica a device."""
    replicas = device_ranks.size
    for found in device_ranks.run(time_outs_of_groups, replicas, 7):
        assert set(found) == {timedelta(minutes=7)}


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
def test_a_packed_row_costs_no_memory_that_grows_with_its_square(
    device_ranks: DeviceRanks, tmp_path: Path, fp32: bool
) -> None:
    model = make_qwen3(tmp_path / "model")
    half = 16_384
    config = make_config(
        model,
        data={"max_tokens_per_gpu": 2 * half, "global_batch_size": 2 * device_ranks.size},
        rollout={"rollout_max_response_len": half},
        algorithm={"log_probs_chunk_size": 1024},
        precision={"fp32": fp32},
    )
    groups = make_groups(0, [(16, half - 16)] * (2 * device_ranks.size))
    rollouts = [make_batches(groups, config, 0, device_ranks.size)]
    for answer in device_ranks.run(memory_of_a_step, config, rollouts):
        assert answer["tokens"] == 2 * half
        # A mask of booleans alone would be a gigabyte.
        assert answer["bytes"] < (2 * half) ** 2


@pytest.mark.parametrize("where", ["host", "disk", "streamed"])
def test_sleep_gives_the_memory_back_and_waking_up_restores_every_bit(
    device_ranks: DeviceRanks, tmp_path: Path, where: Place
) -> None:
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    plain = make_config(model)
    config = make_config(model, offload=offload_to(where, tmp_path / "disk"))
    rollouts = make_rollouts(config, 2, device_ranks.size)
    undisturbed = device_ranks.run(train_rollouts, plain, rollouts)
    for answer, plain in zip(
        device_ranks.run(memory_around_sleep, config, rollouts), undisturbed, strict=True
    ):
        assert answer["unchanged"]
        for awake, asleep in zip(answer["awake"], answer["asleep"], strict=True):
            assert asleep < 0.05 * awake + SEGMENTS
        after = plain["steps"][len(answer["steps"]) :]
        for step, expected in zip(answer["steps"], after, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-5)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
def test_with_shards_in_host_memory_a_run_goes_the_same_way_and_the_device_holds_none(
    device_ranks: DeviceRanks, tmp_path: Path, fp32: bool
) -> None:
    model = make_qwen3(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_layers=4)
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
    resident = make_config(
        model, algorithm=algorithm, optimizer={"clip_grad": 0.05}, precision={"fp32": fp32}
    )
    offloaded = make_config(
        model,
        algorithm=algorithm,
        optimizer={"clip_grad": 0.05},
        precision={"fp32": fp32},
        fsdp={"fsdp_cpu_offload": True},
    )
    rollouts = make_rollouts(resident, 2, device_ranks.size)
    undisturbed = device_ranks.run(train_rollouts, resident, rollouts)
    answers = device_ranks.run(memory_after_a_step, offloaded, rollouts)
    for answer, plain in zip(answers, undisturbed, strict=True):
        assert answer["places"] == ["cpu"]
        assert answer["awake"] < 0.1 * answer["state"]
        assert answer["asleep"] < 0.01 * answer["state"] + SEGMENTS
        assert answer["unchanged"]
        after = plain["steps"][-len(answer["steps"]) :]
        for step, expected in zip(answer["steps"], after, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-5 if fp32 else 1e-2)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4 if fp32 else 5e-2)


def test_a_checkpoint_goes_on_with_its_shards_on_the_device_and_back(
    device_ranks: DeviceRanks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_qwen3, optimizer=SCHEDULE)
    rollouts = make_rollouts(config, 3, device_ranks.size)
    whole, *_ = device_ranks.run(train_rollouts, config, rollouts)
    resident = saving(config, tmp_path, async_save=True)
    host = saving(
        make_config(tiny_qwen3, optimizer=SCHEDULE, fsdp={"fsdp_cpu_offload": True}),
        tmp_path,
        async_save=True,
    )
    device_ranks.run(train_rollouts, host, rollouts[:1], 0, (0,))
    device_ranks.run(train_rollouts, resident, rollouts[:2], 0, (1,))
    resumed, *_ = device_ranks.run(train_rollouts, host, rollouts)
    assert resumed["first"] == 2
    for name, value in resumed["weights"].items():
        expected = from_bytes(whole["weights"][name])
        torch.testing.assert_close(from_bytes(value), expected, atol=1e-5, rtol=0, msg=name)


def test_a_save_in_the_background_holds_the_weights_of_its_rollout(
    device_ranks: DeviceRanks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = saving(make_config(tiny_qwen3, optimizer=SCHEDULE), tmp_path, async_save=True)
    rollouts = make_rollouts(config, 2, device_ranks.size)
    saved = device_ranks.run(save_in_background, config, rollouts)
    found = device_ranks.run(load_and_report, config)
    assert [answer["first"] for answer in found] == [2] * device_ranks.size
    assert all(answer["weights"] == saved[0]["weights"][-1] for answer in found)


def test_a_resumed_run_goes_on_like_the_uninterrupted_one(
    device_ranks: DeviceRanks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_qwen3, optimizer=SCHEDULE)
    rollouts = make_rollouts(config, 3, device_ranks.size)
    whole, *_ = device_ranks.run(train_rollouts, config, rollouts)
    config = saving(config, tmp_path)
    device_ranks.run(train_rollouts, config, rollouts[:2], 0, (1,))
    resumed, *_ = device_ranks.run(train_rollouts, config, rollouts)
    assert resumed["first"] == 2
    for name, value in resumed["weights"].items():
        expected = from_bytes(whole["weights"][name])
        torch.testing.assert_close(from_bytes(value), expected, atol=1e-5, rtol=0, msg=name)


def test_the_contract_holds_and_an_engine_gets_the_trained_weights(
    device_ranks: DeviceRanks, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = make_contract_config("fsdp", tiny_qwen3, tmp_path / "save")
    groups = made_groups(REWARDS, RESPONSES)
    rollouts = [make_batches(groups, config, i, device_ranks.size) for i in range(3)]
    with running_engine(tiny_qwen3, tmp_path / "engine") as engine:
        engines = HttpEngineSet((engine.url,), timeout_s=60)
        first, *_ = device_ranks.run(first_life, config, engines, rollouts)
        second, *_ = device_ranks.run(second_life, config, engines, rollouts)
    assert first["versions"] == [1, 2]
    (held,) = first["in the engines"]
    assert {name: held[name] for name in first["trained"]} == first["trained"] == first["woken"]
    assert (second["first"], second["version"]) == (2, 3)
    assert second["resumed"] == first["end"]
