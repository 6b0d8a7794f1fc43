from dataclasses import replace
from pathlib import Path

import pytest

from miles.config.flags import flag_specs
from miles.config.megatron_flags import MEGATRON_FLAGS
from miles.config.root import MilesConfig
from miles.plan.forecast import Phase, forecast
from miles.plan.job import Job
from miles.plan.memory import GIB
from miles.plan.remedies import remedies
from tests.unit.plan.made_jobs import RUN, config_dir, job_of

MIB = 1 / 1024
"""GiB. Contexts and communicators take 1.25 GiB of every device."""
BASE = 1.25


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return config_dir(tmp_path / "model")


def colocated(model: Path, *more: str, device_gib: float, backend: str = "fsdp") -> Job:
    return job_of(
        *("--train-backend", backend, "--actor-num-gpus-per-node", 4, "--colocate"),
        *("--hf-checkpoint", model, *RUN, *more),
        device_gib=device_gib,
    )


def train(job: Job) -> Phase:
    return next(phase for phase in forecast(job) if phase.name == "train")


def flags(job: Job) -> list[str]:
    return [remedy.flag.split(" ")[0] for remedy in remedies(job)]


def test_what_fits_needs_no_remedy(model: Path) -> None:
    job = colocated(model, device_gib=40)
    assert all(phase.fits for phase in forecast(job))
    assert remedies(job) == []


def test_a_cache_that_is_too_large_names_the_engines_share(model: Path) -> None:
    # 0.95 x 20 GiB of cache and 1.25 GiB beside it.
    job = colocated(model, "--sglang-mem-fraction-static", "0.95", device_gib=20)
    assert [phase.name for phase in forecast(job) if not phase.fits] == ["rollout"]
    (first, *_) = remedies(job)
    assert first.flag == "--sglang-mem-fraction-static 0.7"
    assert first.enough
    assert first.device == pytest.approx(0.25 * 20 * GIB, rel=1e-3)


def test_too_many_tokens_name_the_budget_then_recomputation_then_ranks(model: Path) -> None:
    budget = ("--max-tokens-per-gpu", "65536", "--sglang-mem-fraction-static", "0.1")
    job = colocated(model, *budget, device_gib=BASE + 200 * MIB)
    assert not train(job).fits
    found = flags(job)
    order = ["--max-tokens-per-gpu", "--gradient-checkpointing"]
    assert [flag for flag in found if flag in order] == order
    first = remedies(job)[0]
    # As few halves as make it fit.
    tokens = int(first.flag.split(" ")[1])
    assert first.enough
    assert not train(colocated_with(job, 2 * tokens)).fits
    assert train(colocated_with(job, tokens)).fits


def colocated_with(job: Job, tokens: int) -> Job:
    return replace(job, batch=replace(job.batch, tokens=tokens))


def test_a_flag_that_is_on_is_not_named(model: Path) -> None:
    on = ("--gradient-checkpointing", "--max-tokens-per-gpu", "65536")
    job = colocated(model, *on, "--sglang-mem-fraction-static", "0.1", device_gib=BASE + 100 * MIB)
    assert not train(job).fits
    assert "--gradient-checkpointing" not in flags(job)
    # The trainer sleeps and engines are released already.
    assert "--offload-train" not in flags(job)
    assert "--offload-rollout" not in flags(job)


def test_a_trainer_that_stays_beside_its_engines_is_told_to_sleep(tmp_path: Path) -> None:
    model = config_dir(
        tmp_path / "wide", hidden_size=2048, intermediate_size=8192, num_hidden_layers=8
    )
    job = colocated(
        model, "--no-offload-train", "--sglang-mem-fraction-static", "0.7", device_gib=5
    )
    named = {remedy.flag: remedy for remedy in remedies(job)}
    # A rank's parameters and moments: 12 bytes of a quarter.
    assert named["--offload-train"].device == pytest.approx(3 * job.model.num_parameters, rel=1e-3)


def test_a_cache_without_room_for_a_sample_does_not_work(model: Path) -> None:
    job = job_of(
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 1),
        *("--hf-checkpoint", model, *RUN, "--sglang-max-total-tokens", "100"),
        device_gib=40,
    )
    engine = next(phase for phase in forecast(job) if phase.place == "engine")
    assert engine.too_short == "the key/value cache holds 100 tokens, and a sample may have 128"
    assert not engine.fits
    assert [remedy.flag for remedy in remedies(job)] == ["--sglang-max-total-tokens 128"]


def test_a_host_of_many_sleeping_ranks_may_be_too_small(model: Path) -> None:
    job = job_of(
        *("--train-backend", "fsdp", "--actor-num-gpus-per-node", 4, "--colocate"),
        *("--hf-checkpoint", model, *RUN),
        device_gib=40,
        host_gib=1,
    )
    # Four processes of 414 MiB.
    assert all(phase.excess_host > 0 for phase in forecast(job))
    assert not any(phase.excess_device for phase in forecast(job))


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
def test_every_flag_that_is_named_is_one_of_train_py(backend: str, tmp_path: Path) -> None:
    model = config_dir(
        tmp_path / "wide", hidden_size=2048, intermediate_size=8192, num_hidden_layers=8
    )
    known = {option for spec in flag_specs(MilesConfig) for option in spec.options}
    known |= {f"--{name}" for name in MEGATRON_FLAGS} if backend == "megatron" else set()
    stays = ("--no-offload-train", "--no-offload-rollout", "--max-tokens-per-gpu", "65536")
    job = colocated(model, *stays, device_gib=4, backend=backend)
    named = [
        word
        for remedy in remedies(replace(job, host_bytes=GIB))
        for word in remedy.flag.split(" ")
        if word.startswith("--")
    ]
    assert len(named) > 5
    assert set(named) - known == set()


@pytest.mark.megatron
def test_megatron_is_told_its_own_flags(model: Path) -> None:
    tensor = ("--tensor-model-parallel-size", "2", "--max-tokens-per-gpu", "65536")
    job = colocated(
        model,
        *tensor,
        *("--sglang-mem-fraction-static", "0.1"),
        device_gib=BASE + 400 * MIB,
        backend="megatron",
    )
    found = flags(job)
    assert found.index("--sequence-parallel") < found.index("--recompute-granularity")
    assert "--gradient-checkpointing" not in found
