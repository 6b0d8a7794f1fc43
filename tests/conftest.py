"""Fixtures that many tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer fp32 Qwen3 with tied embeddings and a character tokenizer."""
    from scripts.made_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bf16 with its own ``lm_head``."""
    import torch

    from scripts.made_models import make_qwen3

    return make_qwen3(
        tmp_path_factory.mktemp("models") / "tiny-qwen3-untied", tied=False, dtype=torch.bfloat16
    )
