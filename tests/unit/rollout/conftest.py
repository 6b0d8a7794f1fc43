"""Tokenizers of the rollout tests."""

from typing import Any

import pytest

from scripts.made_models import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token a character, ``<|im_end|>`` ends a turn."""
    return make_tokenizer()
