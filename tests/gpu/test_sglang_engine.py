"""The suite of every engine server against released SGLang on an accelerator, in bf16."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.conftest import SharpModels
from tests.contract.test_engine_conformance import *  # noqa: F403 - its tests and their fixtures
from tests.contract.test_engine_conformance import left_running
from tests.engine_process import ending, launch_sglang

pytestmark = pytest.mark.sglang

OPTIONS = (
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.2"),
    # To release memory.
    "--enable-memory-saver",
)


@pytest.fixture(scope="module")
def sharp() -> SharpModels:
    """As narrow as the attention kernels of released wheels allow."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return SharpModels(tolerance=0.1, sizes={**sizes, "dtype": torch.bfloat16})


@pytest.fixture(scope="module")
def engine_model(sharp: SharpModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of this seed the likeliest tokens lead clearly at first, where a test compares two batches.
    return sharp.write(tmp_path_factory.mktemp("models") / "sharp", seed=5)


@pytest.fixture(scope="module")
def server(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sglang")
    with ending(launch_sglang(engine_model, folder, *OPTIONS)) as engine:
        yield engine.url


@pytest.fixture
def url(server: str) -> Iterator[str]:
    with left_running(server) as url:
        yield url
