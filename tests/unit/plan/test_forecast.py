"""Numbers worked out by hand for a small Qwen3, phase by phase.

Bytes that a layer keeps for a token, in bf16: norms 2 x (6 x 64 + 4) = 776, their outputs 256;
queries 6 x 64 + 4 x 8 = 416 in their norm and 128, keys 6 x 32 + 4 x 4 = 208 and 64, values 64,
output 128 and its normalisers 32; MLP 4 x 2 x 128 = 1,024: together 3,096.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from miles.plan.forecast import COMMUNICATOR_BYTES, CONTEXT_BYTES, Phase, forecast
from miles.plan.job import Job
from tests.unit.plan.made_jobs import RUN, components, config_dir, job_of, moe_config_dir

LAYER, PARAMETERS = 37_008, 180_864
ROOT = 256 * 64 + 64
"""Head and final norm; the embedding is a group of its own."""
KEPT = 4 * 3096
FINAL = 6 * 64 + 4 + 3 * 2 * 64
"""Final norm; rows for the head, the gather of them, their gradient."""
TOKENS = 128
LOGITS = (2 * 4 + 2) * TOKENS * 256
"""All tokens at a time: log-probs, their gradient, and that in bf16."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return config_dir(tmp_path / "model")


def fsdp(model: Path, *more: str, ranks: int = 4) -> Job:
    return job_of(
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", ranks),
        *("--hf-checkpoint", model, *RUN, *more),
    )


def megatron(model: Path, *more: str, ranks: int = 8) -> Job:
    return job_of(
        *("--train-backend", "megatron", "--actor-num-gpus-per-node", ranks),
        *("--hf-checkpoint", model, *RUN, *more),
    )


def of(job: Job, name: str) -> list[Phase]:
    return [phase for phase in forecast(job) if phase.name == name]


def test_a_colocated_engine_generates_while_fsdp_sleeps(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate"), "rollout")
    tokens = (int(0.8 * 2**30) - 2 * PARAMETERS) // 512
    # A token: 2 x 4 layers x 4 heads x 8 x 2 bytes = 512.
    assert components(phase) == {
        "engine weights": 2 * PARAMETERS,
        f"key/value cache, {tokens:,} tokens": 512 * tokens,
    }
    assert components(phase, "host") == {"sleeping trainer": 12 * PARAMETERS // 4}


def test_what_fsdp_pins_tensor_by_tensor_takes_powers_of_two(model: Path) -> None:
    job = fsdp(model, "--colocate", "--fsdp-cpu-offload")
    job = replace(job, layout=replace(job.layout, ranks=3))
    # Thirds of 64 x 64, 64 x 32, 64 x 128, 64 and 8 elements are rounded up to these.
    layer = 2 * 2048 + 2 * 1024 + 3 * 4096 + 2 * 32 + 2 * 4
    rounded = 4 * layer + 2 * 8192 + 32
    (phase,) = of(job, "train")
    found = components(phase, "host")
    assert found["parameters"] == pytest.approx(4 * rounded, rel=1e-3)
    assert found["moments"] == 8 * PARAMETERS // 3


def test_contexts_and_communicators_stand_apart(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate"), "rollout")
    found = {entry.component: entry.bytes.device for entry in phase.lines}
    assert found["CUDA contexts"] == 2 * CONTEXT_BYTES
    assert found["communicators"] == COMMUNICATOR_BYTES


def test_buckets_are_shared_on_the_device_while_the_cache_is_not_back(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--update-weight-buffer-size", "100000"), "sync")
    assert components(phase) == {
        "parameters": 4 * PARAMETERS // 4,
        # The fourth layer's gate_proj does not fit behind what precedes it.
        "weight bucket and a tensor": 90_432 + 2 * 64 * 128,
        "pieces of a tensor": 2 * 256 * 64,
        "shared buckets": 200_000,
        "engine weights": 2 * PARAMETERS,
    }


def test_no_bucket_is_larger_than_the_model_nor_smaller_than_a_tensor(model: Path) -> None:
    (whole,) = of(fsdp(model, "--colocate"), "sync")
    assert components(whole)["shared buckets"] == 2 * 2 * PARAMETERS
    assert components(whole)["weight bucket and a tensor"] == 2 * PARAMETERS
    (small,) = of(fsdp(model, "--colocate", "--update-weight-buffer-size", "10"), "sync")
    assert components(small)["shared buckets"] == 2 * 2 * 256 * 64
    # The embedding, and the first layer's q_proj.
    assert components(small)["weight bucket and a tensor"] == 2 * (256 * 64 + 64 * 64)
    assert "pieces of a tensor" in components(small)


def test_one_rank_has_nothing_to_gather_in_a_sync(model: Path) -> None:
    (sync,) = of(fsdp(model, "--colocate", ranks=1), "sync")
    assert "pieces of a tensor" not in components(sync)


def test_the_embedded_engine_takes_buckets_through_the_host(model: Path) -> None:
    job = fsdp(model, "--colocate", "--rollout-engine", "embedded")
    (sync,) = of(job, "sync")
    assert "shared buckets" not in components(sync)
    # Rank 0's two segments, as a share of its machine's four ranks.
    assert components(sync, "host")["shared buckets"] == 2 * 2 * PARAMETERS // 4
    (rollout,) = of(job, "rollout")
    # 256 rows of the longest sample.
    assert components(rollout)["key/value cache, 32,768 tokens"] == 512 * 256 * 128


def test_the_fullest_moment_of_fsdp_is_the_last_layers_backward_pass(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate"), "train")
    assert phase.moment == "backward pass of a layer"
    # Of a layer's products 2 x 3 x 128, of input and residual 2 x 2 x 64.
    assert components(phase) == {
        "parameters": 4 * PARAMETERS // 4,
        "moments": 8 * PARAMETERS // 4,
        # Eight micro-batches add up before they are shared out.
        "gradients": 4 * PARAMETERS,
        "activations": (KEPT + 1024) * TOKENS,
        "gathered parameters": 2 * ROOT + 2 * 2 * LAYER,
        "gradients not reduced yet": 2 * ROOT + (4 + 2) * LAYER,
    }
    assert components(phase, "host") == {"copies for sleep": 12 * PARAMETERS // 4}


def test_nobody_sleeps_where_recorded_rollouts_take_the_place_of_engines(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--load-debug-rollout-data", "r"), "train")
    assert components(phase, "host") == {}


def test_gradients_that_accumulate_as_shards_are_a_ranks_share(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--accumulate-sharded-gradients"), "train")
    assert components(phase)["gradients"] == 4 * PARAMETERS // 4


def test_the_first_micro_batch_of_a_step_finds_no_gradients(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--global-batch-size", "4"), "train")
    assert "gradients" not in components(phase)


def test_the_head_is_the_fullest_moment_of_a_large_vocabulary(tmp_path: Path) -> None:
    model = config_dir(tmp_path / "wide", vocab_size=4096)
    (phase,) = of(fsdp(model, "--colocate"), "train")
    assert phase.moment == "backward pass of the head"
    found = components(phase)
    assert found["logits"] == (2 * 4 + 2) * TOKENS * 4096
    assert found["activations"] == (KEPT + FINAL) * TOKENS
    assert found["gathered parameters"] == 2 * (4096 * 64 + 64) + 2 * LAYER


def test_checkpointing_keeps_an_input_for_each_layer_and_one_layer_whole(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--gradient-checkpointing"), "train")
    assert components(phase)["activations"] == (4 * 128 + 3096 + 1024) * TOKENS


def test_without_fp32_masters_everything_is_stored_as_in_the_checkpoint(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--no-keep-fp32-master"), "train")
    found = components(phase)
    assert found["parameters"] == 2 * PARAMETERS // 4
    assert found["moments"] == 4 * PARAMETERS // 4


def test_replicas_hold_whole_copies(model: Path) -> None:
    (phase,) = of(fsdp(model, "--colocate", "--dp-replicate-size", "2"), "train")
    assert components(phase)["parameters"] == 4 * PARAMETERS // 2


def test_padded_rows_are_as_long_as_the_longest_sample(model: Path) -> None:
    packing = RUN.index("--use-dynamic-batch-size")
    job = job_of(
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", 4, "--colocate"),
        *("--hf-checkpoint", model, *RUN[:packing], "--micro-batch-size", "2"),
    )
    assert (job.batch.tokens, job.batch.micro_batches) == (2 * 128, 4)


def test_a_checkpoint_holds_parameters_and_moments(model: Path, tmp_path: Path) -> None:
    job = fsdp(model, "--colocate", "--save", str(tmp_path / "save"), "--async-save")
    (phase,) = of(job, "save")
    assert components(phase, "disk") == {"checkpoint": 12 * PARAMETERS // 4}
    assert components(phase, "host")["copy for the save"] == 12 * PARAMETERS // 4
    assert components(phase) == {
        "parameters": 4 * PARAMETERS // 4,
        "moments": 8 * PARAMETERS // 4,
    }


@pytest.mark.megatron
def test_divided_experts_are_gathered_in_a_sync_too(model: Path) -> None:
    job = megatron(model, "--colocate", ranks=2)
    divided = replace(job, layout=replace(job.layout, expert_tensor=2))
    assert "pieces of a tensor" not in components(of(job, "sync")[0])
    assert "pieces of a tensor" in components(of(divided, "sync")[0])


def test_a_save_has_one_tensor_at_a_time_on_the_host(model: Path, tmp_path: Path) -> None:
    job = fsdp(model, "--colocate", "--save", str(tmp_path / "save"))
    (phase,) = of(job, "save")
    assert components(phase, "host") == {
        "copies for sleep": 12 * PARAMETERS // 4,
        "tensor being written": 4 * 256 * 64 // 4,
    }


def test_engines_on_devices_of_their_own_stand_apart(model: Path) -> None:
    job = fsdp(model, "--rollout-num-gpus", "2")
    trainer, engine = of(job, "rollout")
    assert components(trainer) == {
        "parameters": 4 * PARAMETERS // 4,
        "moments": 8 * PARAMETERS // 4,
    }
    assert engine.place == "engine"
    assert components(engine)["engine weights"] == 2 * PARAMETERS


def test_engines_that_stay_are_there_while_the_trainer_trains(model: Path) -> None:
    job = fsdp(model, "--colocate", "--offload-rollout-level", "kv_cache")
    (phase,) = of(job, "train")
    assert components(phase)["engine weights"] == 2 * PARAMETERS


TP2_PP2 = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "2"),
)
STAGE = 2 * (36_864 // 2 + 144) + 256 * 64 // 2
"""Two layers, whose norms every rank has whole, and half of the embedding, or of the head."""
LOCAL_LAYER = (
    (776 + 256) // 2  # norms and their outputs, over the sequence
    + (416 + 208 + 128 + 64 + 128 + 32 + 2 * (64 + 2 * 32)) // 2  # queries, keys and values in one
    + 4 * 2 * 8  # cosines and sines
    + 5 * 2 * 128 // 2  # gate and up in one, a copy of up, silu(gate), product
)


@pytest.mark.megatron
def test_megatron_divides_a_stage_by_tensor_parallelism(model: Path) -> None:
    first, last = of(megatron(model, "--colocate", *TP2_PP2), "train")
    found = components(first)
    assert found["parameters"] == 2 * STAGE
    assert found["gradients"] == 4 * STAGE
    # Two data-parallel ranks.
    assert found["masters"] == 4 * STAGE // 2
    assert found["moments"] == 8 * STAGE // 2
    assert components(last)["parameters"] == 2 * (STAGE + 64)


@pytest.mark.megatron
def test_the_first_stage_keeps_activations_of_as_many_micro_batches_as_there_are_stages(
    model: Path,
) -> None:
    first, last = of(megatron(model, "--colocate", *TP2_PP2), "train")
    # A rank's part of the products and of input and residual, and the gathered input.
    working = 2 * (3 * 64 + 2 * 32) + 2 * 64
    assert first.moment == "backward pass of a layer"
    assert components(first)["activations"] == (2 * 2 * LOCAL_LAYER + working) * TOKENS
    assert last.moment == "backward pass of the head"
    final = (6 * 64 + 4) // 2 + 3 * 2 * 64
    assert components(last)["activations"] == (2 * LOCAL_LAYER + final) * TOKENS
    # Half of the vocabulary: logits, their gradient, that in bf16, and the weight's in fp32.
    assert components(last)["logits"] == (2 * 4 + 2) * TOKENS * 128 + 4 * 128 * 64


@pytest.mark.megatron
def test_a_tied_head_is_a_second_copy_on_the_last_of_several_stages(tmp_path: Path) -> None:
    model = config_dir(tmp_path / "tied", tie_word_embeddings=True)
    _, last = of(megatron(model, "--colocate", *TP2_PP2), "train")
    assert components(last)["parameters"] == 2 * (STAGE + 64)
    (one,) = of(megatron(model, "--colocate", ranks=1), "train")
    assert components(one)["parameters"] == 2 * (PARAMETERS - 256 * 64)


@pytest.mark.megatron
def test_megatron_sleeps_with_whole_parameters_and_shared_out_masters(model: Path) -> None:
    first, _ = of(megatron(model, "--colocate", *TP2_PP2), "rollout")
    assert components(first, "host") == {"sleeping trainer": (2 + 12 // 2) * STAGE}
    assert "gradients" not in components(first)


@pytest.mark.megatron
def test_megatrons_ranks_write_their_own_part_of_the_optimizer(model: Path, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "save"))
    first, _ = of(megatron(model, "--colocate", *TP2_PP2, *save), "save")
    assert components(first, "host") == {
        "copies for sleep": (2 + 12 // 2) * STAGE,
        "tensor being written": 4 * 256 * 64 // 2,
    }
    assert components(first, "disk") == {"checkpoint": 2 * STAGE // 2 + 12 * STAGE // 2}
    # Gradient buffers stay.
    assert components(first)["gradients"] == 4 * STAGE
    first, _ = of(megatron(model, "--colocate", *TP2_PP2, *save, "--async-save"), "save")
    assert components(first, "host")["copy for the save"] == (2 + 12) * STAGE // 2


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "parameter"),
    [
        (("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"), 2),
        (("--fp32",), 4),
    ],
    ids=["narrow moments", "fp32"],
)
def test_megatron_writes_masters_and_moments_in_fp32_whatever_it_keeps(
    model: Path, tmp_path: Path, flags: tuple[str, ...], parameter: int
) -> None:
    save = ("--save", str(tmp_path / "save"))
    (phase,) = of(megatron(model, "--colocate", *flags, *save, ranks=1), "save")
    assert components(phase, "disk") == {"checkpoint": (parameter + 12) * PARAMETERS}


@pytest.mark.megatron
def test_experts_are_divided_by_expert_parallelism(tmp_path: Path) -> None:
    model = moe_config_dir(tmp_path / "moe")
    job = megatron(model, "--colocate", "--expert-model-parallel-size", "2", ranks=4)
    (phase,) = of(job, "train")
    dense = 4 * (64 * (64 + 32 + 32 + 64) + 144 + 8 * 64) + 2 * 256 * 64 + 64
    experts = 4 * 8 * 3 * 64 * 32 // 2
    found = components(phase)
    assert found["parameters"] == 2 * (dense + experts)
    # Four ranks hold the same dense parameters, two the same experts.
    assert found["masters"] == 4 * (dense // 4 + experts // 2)


@pytest.mark.megatron
def test_precision_aware_moments_are_as_narrow_as_asked(model: Path) -> None:
    narrow = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")
    (phase,) = of(megatron(model, "--colocate", *narrow, ranks=1), "train")
    assert components(phase)["moments"] == 6 * PARAMETERS


@pytest.mark.megatron
def test_fp32_runs_have_no_masters(model: Path) -> None:
    (phase,) = of(megatron(model, "--colocate", "--fp32", ranks=1), "train")
    found = components(phase)
    assert "masters" not in found
    assert (found["parameters"], found["moments"]) == (4 * PARAMETERS, 8 * PARAMETERS)


@pytest.mark.megatron
def test_a_streamed_run_is_fullest_when_it_starts_unless_activations_take_more(model: Path) -> None:
    streams = ("--offload-train-target", "disk", "--stream-optimizer-state-to-disk")
    job = megatron(model, "--colocate", *streams, "--offload-train-disk-dir", "/scratch", ranks=1)
    offload = replace(job.offload, chunk_bytes=1)
    job = replace(job, offload=offload, batch=replace(job.batch, tokens=1))
    (phase,) = of(job, "train")
    assert phase.moment == "start of the run"
    # Of each parameter, its place in the buffer of all, and its gradient's.
    assert sum(components(phase).values()) == (2 + 2 + 4) * PARAMETERS


@pytest.mark.megatron
def test_context_parallel_ranks_share_a_budget_of_all_of_them(model: Path) -> None:
    job = megatron(model, "--colocate", "--context-parallel-size", "2", ranks=4)
    assert job.batch.tokens == 128
    (phase,) = of(job, "train")
    # Masters are shared out over data- and context-parallel ranks.
    assert components(phase)["masters"] == 4 * PARAMETERS // 4


@pytest.mark.megatron
def test_full_recomputation_keeps_a_groups_first_input(model: Path) -> None:
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    job = megatron(model, "--colocate", *recompute, "--recompute-num-layers", "2", ranks=1)
    (phase,) = of(job, "train")
    whole = 776 + 256 + 416 + 208 + 128 + 64 + 128 + 32 + 256 + 64 + 1280
    kept = 2 * 128 + 2 * whole + 2 * (3 * 128 + 2 * 64)
    assert components(phase)["activations"] == kept * TOKENS


@pytest.mark.megatron
def test_uneven_stages_are_those_of_megatrons_flags(model: Path) -> None:
    uneven = (*TP2_PP2, "--decoder-first-pipeline-num-layers", "1")
    assert megatron(model, "--colocate", *uneven).layout.stage_layers == (1, 3)
