"""In every layout of a backend engines get the checkpoint's weights, then the trained ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from miles.config.root import MilesConfig
from miles.config.weight_sync import WeightSyncConfig
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.checksums import checksum
from tests.contract.trainer_lives import synced_life
from tests.engine_process import running_engine
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils import jobs
from tests.unit.backends.megatron_utils import engine_jobs
from tests.unit.backends.megatron_utils.layouts import Layout

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "fsdp": None,
    "tp2": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "ep2": Layout(ep=2, dp=2),
    "tp2-ep2": Layout(tp=2, ep=2, sequence_parallel=True),
    "tp2-etp2": Layout(tp=2, etp=2, sequence_parallel=True),
}
CASES = {
    "tiny_qwen3": ("fsdp", "tp2", "pp2", "cp2", "dp2"),
    # Of its matrices of one row rank 1 holds nothing.
    "narrow_qwen3": ("fsdp",),
    "tiny_qwen3_moe": ("fsdp", "pp2", "dp2", "ep2", "tp2-ep2", "tp2-etp2"),
}
QUICK = {
    ("tiny_qwen3", "tp2", "broadcast"),
    ("tiny_qwen3", "pp2", "colocated"),
    ("narrow_qwen3", "fsdp", "broadcast"),
    ("tiny_qwen3_moe", "ep2", "broadcast"),
}


def make_config(model: Path, layout: Layout | None, transport: str) -> MilesConfig:
    """fp32 whatever the checkpoint's dtype; buckets so small that a layer takes several."""
    if layout is None:
        config = jobs.make_config(model)
    else:
        config = engine_jobs.make_config(model, *layout.argv, **layout.groups)
    return replace(
        config,
        cluster=replace(config.cluster, colocate=transport == "colocated"),
        weight_sync=WeightSyncConfig(
            check_weight_update_equal=True, update_weight_buffer_size=20_000
        ),
    )


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def engines(
    model: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpEngineSet]:
    with running_engine(model[1], tmp_path_factory.mktemp("engine")) as engine:
        yield HttpEngineSet((engine.url,), timeout_s=60)


@pytest.mark.parametrize(
    ("model", "layout", "transport"),
    [
        pytest.param(
            name,
            layout,
            transport,
            marks=() if (name, layout, transport) in QUICK else (pytest.mark.full,),
        )
        for name, layouts in CASES.items()
        for layout in layouts
        for transport in ("colocated", "broadcast")
    ],
    indirect=["model"],
)
def test_an_engine_holds_what_the_trainer_holds_before_and_after_training(
    model: tuple[str, Path],
    layout: str,
    transport: str,
    engines: HttpEngineSet,
    two_ranks: Ranks,
) -> None:
    path, sizes = model[1], LAYOUTS[layout]
    config = make_config(path, sizes, transport)
    rollouts = jobs.make_rollouts(config, 1, dp_size=2 if sizes is None else sizes.dp)
    lives: list[Any] = two_ranks.run_well(synced_life, config, engines, rollouts)
    stored = load_file(path / "model.safetensors")
    original = {name: checksum(tensor) for name, tensor in stored.items()}
    (before,), (after,) = lives[0]["before"], lives[0]["after"]
    assert {name: before[name] for name in original} == original
    trained = lives[0]["trained"]
    assert {name: after[name] for name in trained} == trained
    assert lives[1]["trained"] == trained
    assert trained.keys() == original.keys()
    assert sum(trained[name] != original[name] for name in trained) > len(trained) // 2
