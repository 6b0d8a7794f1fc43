"""Adam as Megatron's optimizers expect it from Transformer Engine or Apex, on PyTorch's kernels.

PyTorch's own Adam counts the step per parameter, which megatron-core 0.19 cannot load from a
checkpoint; here, as in the two packages, it is an entry of the param group. For
``--use-precision-aware-optimizer`` it also holds the fp32 main parameters, reads gradients of
another dtype than the parameter's from ``decoupled_grad``, and stores moments in bf16 if asked.
"""

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils import adam

_DTYPES = (torch.float32, torch.bfloat16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ENGINE = "needs Transformer Engine"

MAIN = "master_param"
"""The key under which Megatron looks for the main parameter in the state."""


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980), decoupled weight decay (Loshchilov and Hutter,
    arXiv:1711.05101) with ``adam_w_mode``. The arguments are those that Megatron passes.

    With ``master_weights`` the state holds each parameter in fp32, and the parameter itself is its
    rounded copy. Raises ``ValueError`` for what only Transformer Engine's kernels store.
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        if capturable:
            raise ValueError(f"--optimizer-cuda-graph {_ENGINE}")
        if store_param_remainders:
            raise ValueError(f"--store-param-remainders {_ENGINE}")
        if master_weight_dtype != torch.float32:
            raise ValueError(f"--main-params-dtype {master_weight_dtype} {_ENGINE}; pass fp32")
        self.state_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        for name, dtype in self.state_dtypes.items():
            if dtype not in _DTYPES:
                flag = f"--{name.replace('_', '-')}-dtype"
                raise ValueError(f"{flag} {dtype} {_ENGINE}; pass fp32 or bf16")
        if master_weights:
            self.state_dtypes[MAIN] = master_weight_dtype
        self.adam_w_mode = adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient; each group counts its steps."""
        assert closure is None, "Megatron computes the gradients before the step"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            updated = [p for p in group["params"] if self._gradient(p) is not None]
            for param in updated:
                if not self.state[param]:
                    self.initialize_state(param)
            if self._is_plain(updated):
                self._update(group, updated)
            else:
                self._update_one_by_one(group, updated)

    def initialize_state(self, param: Tensor) -> None:
        """Zero moments and, if held here, the main parameter."""
        for name in self.state_dtypes:
            tensor = self.state[param][name] = self._empty_state(param, name)
            if name == MAIN:
                tensor.copy_(param.detach())
            else:
                tensor.zero_()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """A state in fp32: the tensor itself if it is stored so."""
        return self.state[param][name].float()

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        """Store a state that Megatron read from a checkpoint, in the dtype it is kept in."""
        state = self.state[param]
        if name not in state:
            state[name] = self._empty_state(param, name)
        state[name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like PyTorch's, which would bring every state to its parameter's dtype and device."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own = group["params"]
            group.clear()
            group.update({**saved, "params": own})
            for number, param in zip(saved["params"], own, strict=True):
                stored = state_dict["state"].get(number, {})
                for name in self.state_dtypes.keys() & stored.keys():
                    self.set_scaled_state(param, name, stored[name])

    def _empty_state(self, param: Tensor, name: str) -> Tensor:
        """Where one state of a parameter will be."""
        return torch.empty_like(param, dtype=self.state_dtypes[name], requires_grad=False)

    def _gradient(self, param: Tensor) -> Tensor | None:
        return getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad

    def _is_plain(self, params: list[Tensor]) -> bool:
        fp32 = set(self.state_dtypes.values()) == {torch.float32}
        held_elsewhere = MAIN not in self.state_dtypes and not self.use_decoupled_grad
        return fp32 and held_elsewhere and all(p.dtype == torch.float32 for p in params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        gradients = [param.grad for param in params]
        means, squares = ([self.state[p][name] for p in params] for name in _MOMENTS)
        self._adam(group, params, gradients, (means, squares))

    def _update_one_by_one(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """No more than one parameter is widened to fp32 at once."""
        for param in params:
            gradient = self._gradient(param)
            assert gradient is not None
            param.copy_(self._update_wide(group, param, gradient))

    def _update_wide(self, group: dict[str, Any], param: Tensor, gradient: Tensor) -> Tensor:
        """The parameter's next value in fp32, where its state is, as the gradient has to be."""
        state = self.state[param]
        main = state.get(MAIN)
        wide = {name: state[name].float() for name in _MOMENTS}
        target = param.detach().float() if main is None else main
        self._adam(group, [target], [gradient.float()], tuple([m] for m in wide.values()))
        for name, value in wide.items():
            state[name].copy_(value)
        return target

    def _adam(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Any],
        moments: tuple[list[Tensor], ...],
    ) -> None:
        means, squares = moments
        adam.update(
            params,
            gradients,
            (means, squares),
            group,
            num_steps=group["step"],
            decoupled=self.adam_w_mode,
        )


def read_parameters(adam: Any) -> None:
    """Make the main parameters that an Adam holds the present parameters.

    Works on Transformer Engine's too, which may hold of a main parameter only the bits that its
    parameter lacks. A parameter without state gets its main one in the first step.
    """
    for param, state in adam.state.items():
        if MAIN not in state:
            continue
        if state[MAIN].dtype == torch.int16:
            state[MAIN].zero_()
        else:
            adam.set_scaled_state(param, MAIN, param.detach().float())


def install() -> None:
    """Make Megatron's optimizers use :class:`FusedAdam` where neither Transformer Engine nor Apex
    is installed; does nothing elsewhere, nor when called again."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    # The config of a precision-aware optimizer imports Transformer Engine's Adam to see what it
    # can do; for the time of that look it finds ours.
    ours = types.ModuleType("transformer_engine.pytorch.optimizers")
    ours.FusedAdam = FusedAdam  # pyright: ignore[reportAttributeAccessIssue]
    check = OptimizerConfig.__post_init__

    def check_with_ours(self: OptimizerConfig) -> None:
        sys.modules[ours.__name__] = ours
        try:
            check(self)
        finally:
            del sys.modules[ours.__name__]

    OptimizerConfig.__post_init__ = check_with_ours
