"""A mixture with shared experts on one or two ranks. Tokens: rows of ``hidden()``."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

HIDDEN, NUM_TOKENS = 32, 16
NUM_EXPERTS, NUM_CHOSEN, EXPERT, SHARED = 4, 2, 12, 20
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_sp": {"tensor_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_sp_ep2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
"""All of two ranks, each of which has half of the tokens."""


class Share(NamedTuple):
    """A tensor that belongs to a parameter, and which part of the full one it is."""

    tensor: Tensor
    part: int
    num_parts: int


def full_weights() -> dict[str, Tensor]:
    """By short name; ``fc1`` has the rows of the gate, then those of the up projection."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"shared": SHARED} | {f"expert{i}": EXPERT for i in range(NUM_EXPERTS)}
    shapes = {"router": (NUM_EXPERTS, HIDDEN), "shared.gate": (1, HIDDEN)}
    for name, size in sizes.items():
        shapes |= {f"{name}.fc1": (2 * size, HIDDEN), f"{name}.fc2": (HIDDEN, size)}
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def hidden() -> tuple[Tensor, Tensor]:
    """The input, and what the loss multiplies the output with: ``[NUM_TOKENS, HIDDEN]``."""
    first, second = torch.randn(
        2, NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6)
    ).unbind()
    return first, second


def part_of(name: str, full: Tensor, part: int, num_parts: int) -> Tensor:
    """What a tensor-parallel rank holds of a weight."""
    if name.endswith("fc1"):
        return torch.cat([half.chunk(num_parts)[part] for half in full.chunk(2)])
    return full.chunk(num_parts, dim=1)[part] if name.endswith("fc2") else full


def run_mixture(layout: str, gated: bool) -> dict[str, Any]:
    """Output and gradients of this rank for a loss that is a sum over all tokens."""
    with parallel(**LAYOUTS[layout]):
        return _run(layout, gated)


def _run(layout: str, gated: bool) -> dict[str, Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.spec_utils import build_module

    from miles.backends.megatron_utils.router import use_exact_routers
    from miles.backends.megatron_utils.specs import block_spec

    config = make_config(
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=NUM_CHOSEN,
        moe_ffn_hidden_size=EXPERT,
        moe_shared_expert_intermediate_size=SHARED,
        moe_shared_expert_gate=gated,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        sequence_parallel="sp" in layout,
        **LAYOUTS[layout],
    )
    mixture = build_module(block_spec(config).layer_specs[0], config=config, layer_number=1).mlp
    use_exact_routers([mixture])
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), mixture)
    model.zero_grad_buffer()
    places = _places(mixture)
    weights = full_weights()
    with torch.no_grad():
        for short, (parameter, part, num_parts) in places.items():
            parameter.copy_(part_of(short, weights[short], part, num_parts))
    positions = torch.arange(NUM_TOKENS).chunk(2)[torch.distributed.get_rank()]
    tokens, factors = (tensor[positions, None] for tensor in hidden())
    tokens.requires_grad_()
    output, _ = model(tokens)
    (output * factors).sum().backward()
    finalize_model_grads([model], None)
    return {
        "positions": positions,
        "output": output.detach()[:, 0],
        "input": tokens.grad[:, 0],
        "weights": {
            short: Share(parameter.main_grad.clone(), part, num_parts)
            for short, (parameter, part, num_parts) in places.items()
        },
    }


def _places(mixture: nn.Module) -> Mapping[str, tuple[Any, int, int]]:
    """Parameters of this rank by short name, each with its part and the number of parts."""
    from megatron.core import parallel_state as mpu

    tensor = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_world_size(),
    )
    expert = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    num_local = NUM_EXPERTS // mpu.get_expert_model_parallel_world_size()
    first = num_local * mpu.get_expert_model_parallel_rank()
    found: dict[str, tuple[Any, int, int]] = {}
    for name, parameter in mixture.named_parameters():
        match = re.search(r"local_experts\.(\d+)\.linear_(fc\d)", name)
        if match:
            found[f"expert{first + int(match[1])}.{match[2]}"] = (parameter, *expert)
        elif name == "router.weight":
            found["router"] = (parameter, 0, 1)
        else:
            last = {"gate_weight": "gate", "weight": name.split("_")[-1].split(".")[0]}
            found[f"shared.{last[name.rpartition('.')[2]]}"] = (parameter, *tensor)
    return found
