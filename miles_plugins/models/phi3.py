"""Phi-3 and Phi-4: Megatron's own layers, under another layout of the checkpoint.

``--spec miles_plugins.models.phi3 get_phi3_spec``.
"""

import argparse
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from miles.backends.megatron_utils.specs import block_spec
from miles_plugins.mbridge.phi3 import BRIDGE

__all__ = ["BRIDGE", "get_phi3_spec"]


def get_phi3_spec(
    args: argparse.Namespace, config: Any, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    del args
    return block_spec(config, vp_stage)
