"""Megatron's distributed optimizer over FusedAdam, on two data-parallel ranks."""

import copy
from typing import Any

import torch

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

STEPS = 3


def train(precision_aware: bool) -> dict[str, Any]:
    """Train, save the optimizer, train on; then load and train on again."""
    with parallel():
        return _train(precision_aware)


def _train(precision_aware: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from miles.backends.megatron_utils import fused_adam

    fused_adam.install()
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    torch.manual_seed(5)
    network = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 8)).bfloat16()
    start = copy.deepcopy(network.state_dict())
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    network.config = config  # pyright: ignore[reportArgumentType]
    model = DistributedDataParallel(config, ddp, network)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=precision_aware,
            clip_grad=1.0,
            weight_decay=0.1,
        ),
        [model],
    )
    rank = parallel_state.get_data_parallel_rank()
    norms = [_step(model, optimizer, 10 * step + rank) for step in range(STEPS)]
    weights = copy.deepcopy(network.state_dict())
    common = copy.deepcopy(optimizer.state_dict())
    states = _parameter_states(optimizer)
    _step(model, optimizer, 90 + rank)
    continued = _values(network)
    network.load_state_dict(weights)
    optimizer.load_state_dict(common)
    _set_parameter_states(optimizer, states)
    _step(model, optimizer, 90 + rank)
    return {
        "moved": max((weights[n] - start[n]).abs().max().item() for n in weights),
        "weights": weights,
        "norms": norms,
        "continued": continued,
        "reloaded": _values(network),
    }


def _step(model: Any, optimizer: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    inputs = torch.randn(4, 32, generator=generator).bfloat16()
    model(inputs).float().square().sum().backward()
    model.finish_grad_sync()
    succeeded, norm, _ = optimizer.step()
    assert succeeded
    return float(norm)


def _distributed(optimizer: Any) -> Any:
    (inner,) = optimizer.chained_optimizers
    return inner


def _parameter_states(optimizer: Any) -> Any:
    inner = _distributed(optimizer)
    return [
        {
            name: value.clone()
            for name, value in inner._get_main_param_and_optimizer_states(p).items()
        }
        for p in inner.model_param_group_index_map
    ]


def _set_parameter_states(optimizer: Any, states: Any) -> None:
    inner = _distributed(optimizer)
    for param, state in zip(inner.model_param_group_index_map, states, strict=True):
        inner._set_main_param_and_optimizer_states(param, state)


def _values(network: torch.nn.Module) -> dict[str, list[float]]:
    return {n: p.detach().float().flatten().tolist() for n, p in network.named_parameters()}
