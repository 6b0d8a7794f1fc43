"""In every layout of a backend engines get the checkpoint's weights, then the trained ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from miles.config.root import MilesConfig
from miles.config.weight_sync import WeightSyncConfig
from miles.rollout.engine_set import HttpEngineSet
from miles.weight_sync.checksums import checksum
from tests.contract.trainer_lives import streamed_life, synced_life
from tests.engine_process import running_engine
from tests.ranks import Ranks
from tests.unit.backends.fsdp_utils import jobs
from tests.unit.backends.megatron_utils import engine_jobs
from tests.unit.backends.megatron_utils.layouts import LAYOUTS, Layout, params

pytestmark = pytest.mark.megatron

NOT_SERVED = "qwen3_5"
"""By the embedded engine, which keeps keys and values alone."""
TRANSPORTS = ("broadcast", "colocated")
FSDP_MODELS = ("tiny_qwen3", "tiny_qwen3_moe", "narrow_qwen3")
"""Of the matrices of one row in the last one rank 1 holds nothing."""
BF16 = (
    Layout(model="moe", ep=2, dp=2),
    Layout(model="moe", tp=2, etp=2, sequence_parallel=True),
)
"""For a checkpoint in bf16, which the trainer holds in fp32."""


def served() -> list[Any]:
    """A model, the layout that trains it (``None``: FSDP on two ranks) and a transport: each layout
    of the table once, with the transports in turn."""
    cases = [
        case(model, None, t, quick=(model, t) == ("narrow_qwen3", "broadcast"))
        for model in FSDP_MODELS
        for t in TRANSPORTS
    ]
    cases += [case("tiny_qwen3_moe", layout, t) for layout in BF16 for t in TRANSPORTS]
    # Neighbours share an engine.
    layouts = sorted((x for x in LAYOUTS if x.model != NOT_SERVED), key=lambda x: x.model)
    for number, layout in enumerate(layouts):
        transport = TRANSPORTS[number % len(TRANSPORTS)]
        cases.append(case(layout.model, layout, transport, quick=layout.quick))
    return cases


def case(model: str, layout: Layout | None, transport: str, *, quick: bool = False) -> Any:
    marks = () if quick else pytest.mark.full
    name = f"{layout or 'fsdp'}-{transport}"
    if layout is None or model.startswith("tiny"):
        name = f"{model}-{name}"
    return pytest.param(model, layout, transport, id=name, marks=marks)


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


def originals(model: Path) -> dict[str, str]:
    stored = load_file(model / "model.safetensors")
    return {name: checksum(tensor) for name, tensor in stored.items()}


def assert_trained(lives: list[Any], original: dict[str, str]) -> None:
    """Every rank has the same weights, of all names, most of which are not the checkpoint's."""
    trained = lives[0]["trained"]
    assert all(life["trained"] == trained for life in lives)
    assert trained.keys() == original.keys()
    assert sum(trained[name] != original[name] for name in trained) > len(trained) // 2


@pytest.fixture(scope="module")
def paths(
    models: dict[str, Path], tiny_qwen3: Path, tiny_qwen3_moe: Path, narrow_qwen3: Path
) -> dict[str, Path]:
    return {
        **models,
        "tiny_qwen3": tiny_qwen3,
        "tiny_qwen3_moe": tiny_qwen3_moe,
        "narrow_qwen3": narrow_qwen3,
    }


Serve = Callable[[Path], HttpEngineSet]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """An engine of that model: the last one, if it has it."""
    running = ExitStack()
    served: dict[Path, HttpEngineSet] = {}

    def engine_of(model: Path) -> HttpEngineSet:
        if model not in served:
            running.close()
            served.clear()
            engine = running.enter_context(running_engine(model, tmp_path_factory.mktemp("engine")))
            served[model] = HttpEngineSet((engine.url,), timeout_s=60)
        return served[model]

    with running:
        yield engine_of


@pytest.mark.parametrize(("name", "layout", "transport"), served())
def test_an_engine_holds_what_the_trainer_holds_before_and_after_training(
    name: str,
    layout: Layout | None,
    transport: str,
    serve: Serve,
    megatron_ranks: Ranks,
    paths: dict[str, Path],
) -> None:
    model = paths[name]
    config = make_config(model, layout, transport)
    dp_size, num_ranks = (2, 2) if layout is None else (layout.dp, layout.num_ranks)
    rollouts = jobs.make_rollouts(config, 1, dp_size=dp_size)
    lives: list[Any] = megatron_ranks.run_well(
        synced_life, config, serve(model), rollouts, num_ranks=num_ranks
    )
    original = originals(model)
    (before,), (after,) = lives[0]["before"], lives[0]["after"]
    assert {name: before[name] for name in original} == original
    trained = lives[0]["trained"]
    assert {name: after[name] for name in trained} == trained
    assert_trained(lives, original)


@pytest.mark.parametrize("layout", params(x for x in LAYOUTS if x.model == NOT_SERVED))
def test_a_model_that_no_engine_serves_leaves_the_trainer_whole(
    layout: Layout, models: dict[str, Path], megatron_ranks: Ranks
) -> None:
    """What a sync would send: before training it is the checkpoint."""
    path = models[layout.model]
    config = make_config(path, layout, "broadcast")
    rollouts = jobs.make_rollouts(config, 1, dp_size=layout.dp)
    lives: list[Any] = megatron_ranks.run_well(
        streamed_life, config, rollouts, num_ranks=layout.num_ranks
    )
    original = originals(path)
    assert all(life["before"] == original for life in lives)
    assert_trained(lives, original)
