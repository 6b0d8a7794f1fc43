"""Parameters that keep a dtype of their own through Megatron's cast of the model to bf16 or fp16.

Where the dtype is decided everything follows it: gradient buffers and optimizer (grouped by dtype),
checkpoints, and what is read from and handed out under Hugging Face names.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from megatron.training import training
from torch import nn

_MARK = "marked_dtype"


def mark_param_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give the parameter this dtype now and for good.

    Called where a module of a ``--spec`` is made. The module has to compute with it: its other
    parameters and its inputs have the dtype of the model.
    """
    parameter.data = parameter.data.to(dtype)
    setattr(parameter, _MARK, dtype)


@contextmanager
def marked_dtypes_kept() -> Generator[None]:
    """While Megatron builds a model: its cast leaves marked parameters as they are."""
    before = training.Float16Module
    training.Float16Module = _Float16Module
    try:
        yield
    finally:
        training.Float16Module = before


def number_marked_parameters(optimizer: Any) -> None:
    """Have a distributed optimizer find each parameter's state where it is.

    megatron-core 0.19 numbers the parameters of a group buffer by buffer, but lists the fp32 ones
    first: with parameters of two dtypes it would save and load one's state as another's.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer or not hasattr(part, "model_param_group_index_map"):
            continue
        groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        for index, (fp32, float16) in enumerate(groups):
            for order, parameter in enumerate([*fp32, *float16]):
                part.model_param_group_index_map[parameter] = index, order


class _Float16Module(Float16Module):
    def __init__(self, config: Any, module: nn.Module) -> None:
        marked = [p for p in module.parameters() if hasattr(p, _MARK)]
        values = [p.data for p in marked]
        super().__init__(config, module)
        for parameter, value in zip(marked, values, strict=True):
            parameter.data = value
