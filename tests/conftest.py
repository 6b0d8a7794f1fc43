"""Fixtures that many tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.backends.sglang_utils.package import is_installed
from tests.ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of SGLang skip where it is not installed."""
    if is_installed():
        return
    absent = pytest.mark.skip(reason="sglang is not installed: make sglang-cpu")
    for item in items:
        if item.get_closest_marker("sglang") is not None:
            item.add_marker(absent)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer fp32 Qwen3 with tied embeddings and a character tokenizer."""
    from scripts.made_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def narrow_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with MLPs of one neuron: matrices of one row, of which only one rank has a shard."""
    from scripts.made_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "narrow-qwen3", intermediate_size=1)


@pytest.fixture(scope="session")
def tiny_qwen3_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bf16 with its own ``lm_head``."""
    import torch

    from scripts.made_models import make_qwen3

    return make_qwen3(
        tmp_path_factory.mktemp("models") / "tiny-qwen3-untied", tied=False, dtype=torch.bfloat16
    )


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer bf16 Qwen3-MoE with 4 experts, which its files hold one by one."""
    import torch

    from scripts.made_models import make_qwen3_moe

    return make_qwen3_moe(
        tmp_path_factory.mktemp("models") / "tiny-qwen3-moe",
        hidden_size=32,
        expert_size=16,
        num_experts=4,
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes for jobs over gloo, started with the first test that needs them."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    """Up to eight processes for the layouts of the Megatron backend; the first tests start few."""
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that fit every layout of the Megatron backend, by name."""
    from tests.unit.backends.megatron_utils.made_models import make_models

    return make_models(tmp_path_factory.mktemp("megatron-models"))
