from dataclasses import replace
from typing import Any

from miles.plan.memory import Bytes, total
from miles.plan.residency import Offload, StateBytes

MIB = 2**20
FSDP = StateBytes(parameters=100, optimized=100, parameter_bytes=4, gradient_bytes=4)
MEGATRON = StateBytes(
    parameters=100, optimized=25, parameter_bytes=2, gradient_bytes=4, master_bytes=4
)
"""A distributed optimizer over four ranks."""


def elsewhere(state: StateBytes, **flags: Any) -> StateBytes:
    return replace(state, offload=Offload(**flags))


def test_an_fp32_parameter_is_its_own_master_and_costs_12_bytes_with_its_moments() -> None:
    assert total(FSDP.awake()) == Bytes(device=1200)
    assert total(FSDP.gradients()) == Bytes(device=400)


def test_masters_and_moments_of_a_distributed_optimizer_are_shared_out() -> None:
    # 2 x 100 + (4 + 8) x 25
    assert total(MEGATRON.awake()) == Bytes(device=500)


def test_a_reference_costs_a_parameter_of_its_own() -> None:
    assert total(replace(MEGATRON, reference_bytes=2).awake()) == Bytes(device=700)


def test_a_sleeping_trainer_is_on_the_host_and_its_copies_stay_there() -> None:
    sleeper = elsewhere(MEGATRON, sleeps=True)
    assert total(sleeper.asleep()) == Bytes(host=500)
    assert total(sleeper.awake()) == Bytes(device=500, host=500)


def test_a_trainer_that_does_not_sleep_keeps_the_device() -> None:
    assert total(MEGATRON.asleep()) == Bytes(device=500)


def test_a_trainer_that_sleeps_on_disk_has_two_chunks_of_host_memory() -> None:
    sleeper = elsewhere(MEGATRON, sleeps=True, target="disk", chunk_bytes=MIB)
    assert total(sleeper.asleep()) == Bytes(host=2 * MIB, disk=500)


def test_a_streamed_optimizer_is_files_but_for_two_buckets_in_its_step() -> None:
    streamed = elsewhere(MEGATRON, streams=True, chunk_bytes=MIB)
    assert total(streamed.awake()) == Bytes(device=200, host=3 * MIB, disk=300)
    assert total(streamed.buckets()) == Bytes(device=2 * MIB)
    assert total(MEGATRON.buckets()) == Bytes()


def test_streamed_moments_in_bf16_take_half_the_disk() -> None:
    streamed = elsewhere(MEGATRON, streams=True, streamed_moment_bytes=4, chunk_bytes=MIB)
    assert total(streamed.awake()) == Bytes(device=200, host=3 * MIB, disk=200)


def test_a_sleeping_trainer_with_a_streamed_optimizer_copies_its_parameters_alone() -> None:
    streamed = elsewhere(MEGATRON, streams=True, sleeps=True, target="disk", chunk_bytes=MIB)
    assert total(streamed.asleep()) == Bytes(host=(2 + 3) * MIB, disk=500)
    assert total(streamed.asleep(in_sync=True)).device == 200


def test_fsdp_streams_moments_and_keeps_the_parameters_that_are_masters() -> None:
    streamed = elsewhere(FSDP, streams=True, chunk_bytes=MIB)
    assert total(streamed.awake()) == Bytes(device=400, host=3 * MIB, disk=800)


def test_parameters_stay_for_the_weight_update_beside_the_memory_of_their_copy() -> None:
    sleeper = elsewhere(MEGATRON, sleeps=True)
    assert total(sleeper.asleep()) == Bytes(host=500)
    assert total(sleeper.asleep(in_sync=True)) == Bytes(device=200, host=500)


def test_rematerialized_parameters_have_no_copy() -> None:
    sleeper = elsewhere(MEGATRON, sleeps=True, rematerializes=True)
    assert total(sleeper.asleep()) == Bytes(host=300)
    assert total(sleeper.asleep(in_sync=True)) == Bytes(device=200, host=300)


def test_parameters_without_masters_cannot_be_rematerialized() -> None:
    sleeper = elsewhere(FSDP, sleeps=True, rematerializes=True)
    assert total(sleeper.asleep()) == Bytes(host=1200)


def test_state_that_is_on_the_host_always_does_not_move() -> None:
    there = elsewhere(FSDP, on_host=True, sleeps=True)
    assert total(there.awake()) == total(there.asleep()) == Bytes(host=1200)
    assert total(there.gradients()) == Bytes(host=400)


def test_fsdp_pins_parameters_and_gradients_in_host_memory_but_no_moments() -> None:
    there = replace(elsewhere(FSDP, on_host=True), pinned=1.5)
    assert total(there.awake()) == Bytes(host=600 + 800)
    assert total(there.gradients()) == Bytes(host=600)


def test_an_optimizer_in_host_memory_is_there_awake_and_asleep() -> None:
    half = elsewhere(MEGATRON, optimizer_on_host=0.5, sleeps=True)
    # Of (4 + 8) x 25 half; asleep all of it, and the parameters.
    assert total(half.asleep()) == Bytes(host=150 + 150 + 200)
    assert total(half.awake()) == Bytes(device=200 + 150, host=150 + 200 + 150)


def test_each_rank_writes_its_part_of_a_checkpoint() -> None:
    assert FSDP.checkpoint_bytes(optimizer=True) == 1200
    # Two replicas hold the same.
    assert FSDP.checkpoint_bytes(optimizer=True, copies=(2, 2)) == 600
    # Four ranks hold the same parameters, each a quarter of the masters and moments.
    assert MEGATRON.checkpoint_bytes(optimizer=True, copies=(4, 1)) == 50 + 300
    assert MEGATRON.checkpoint_bytes(optimizer=False, copies=(4, 1)) == 50
