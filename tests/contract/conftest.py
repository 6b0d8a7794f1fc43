"""Engines that the contract tests share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess, ending, launch_sglang, running_engine

ENGINE_ROWS = 20
"""Sequences that the shared engine runs at once: few, so that tests fill it."""


@dataclass(frozen=True)
class SharpModels:
    """Tiny models whose greedy text varies and whose weights show in every log-prob: a freshly
    initialised one repeats a token at nearly uniform probabilities."""

    tolerance: float
    """Of log-probs, between an engine and transformers in fp32."""
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """As ``make_qwen3`` takes them."""

    def write(self, path: Path, seed: int) -> Path:
        from transformers import AutoModelForCausalLM

        from scripts.made_models import make_qwen3

        make_qwen3(path, tied=False, seed=seed, **self.sizes)
        model = AutoModelForCausalLM.from_pretrained(path)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)
        model.save_pretrained(path)
        return path


@pytest.fixture(scope="session")
def sharp() -> SharpModels:
    """In fp32."""
    return SharpModels(tolerance=1e-5)


@pytest.fixture(scope="session")
def engine_model(sharp: SharpModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the shared engines serve."""
    return sharp.write(tmp_path_factory.mktemp("models") / "sharp", seed=0)


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
