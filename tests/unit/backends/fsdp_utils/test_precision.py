from dataclasses import replace

import pytest
import torch

from miles.backends.fsdp_utils.precision import make_precision
from miles.config.fsdp import FsdpConfig
from miles.config.precision import PrecisionConfig
from miles.config.root import MilesConfig


@pytest.mark.parametrize(
    ("flags", "checkpoint", "compute", "stored", "exported"),
    [
        ({}, "bfloat16", "bfloat16", "float32", "bfloat16"),
        ({}, "float32", "bfloat16", "float32", "float32"),
        ({"precision": {"fp32": True}}, "bfloat16", "float32", "float32", "bfloat16"),
        ({"precision": {"fp16": True}}, "bfloat16", "float16", "float32", "float16"),
        ({"precision": {"fp16": True}}, "float32", "float16", "float32", "float32"),
        ({"fsdp": {"keep_fp32_master": False}}, "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_compute_storage_and_export_dtypes(
    flags: dict[str, dict[str, bool]], checkpoint: str, compute: str, stored: str, exported: str
) -> None:
    config = MilesConfig(
        precision=PrecisionConfig(**flags.get("precision", {})),
        fsdp=FsdpConfig(**flags.get("fsdp", {})),
    )
    precision = make_precision(config)
    kind: torch.dtype = getattr(torch, checkpoint)
    assert precision.compute == getattr(torch, compute)
    assert precision.stored(kind) == getattr(torch, stored)
    assert precision.exported(kind) == getattr(torch, exported)
    assert precision.mixed_precision_policy().reduce_dtype == torch.float32


def test_a_reference_is_stored_as_it_is_gathered() -> None:
    frozen = replace(make_precision(MilesConfig()), frozen=True)
    assert frozen.stored(torch.float32) == torch.bfloat16
