"""Engines that the contract tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_process import EngineProcess, ending, launch_sglang, running_engine

ENGINE_ROWS = 20
"""Sequences that the shared engine runs at once: few, so that tests fill it."""


def write_sharp_model(path: Path, seed: int) -> Path:
    """A tiny fp32 model whose greedy text varies and whose weights show in every log-prob: a
    freshly initialised one repeats a token at nearly uniform probabilities."""
    from transformers import AutoModelForCausalLM

    from scripts.made_models import make_qwen3

    make_qwen3(path, tied=False, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the shared engines serve."""
    return write_sharp_model(tmp_path_factory.mktemp("models") / "sharp", seed=0)


@pytest.fixture(scope="session")
def engine_url(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an embedded engine that serves ``engine_model``."""
    options = ("--max-running-requests", str(ENGINE_ROWS))
    with running_engine(engine_model, tmp_path_factory.mktemp("engine"), *options) as engine:
        yield engine.url


@pytest.fixture(scope="session")
def sglang_engine(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Released SGLang that serves ``engine_model``."""
    with ending(launch_sglang(engine_model, tmp_path_factory.mktemp("sglang"))) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang_url(sglang_engine: EngineProcess) -> str:
    return sglang_engine.url
