"""Megatron's optimizer with the learning-rate schedule of both backends: one step at a time."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from megatron.training.training import get_megatron_optimizer_config
from torch import Tensor, nn

from miles.backends.megatron_utils import host_adam
from miles.backends.megatron_utils.fp32_param_utils import number_marked_parameters
from miles.backends.megatron_utils.fused_adam import read_parameters
from miles.backends.megatron_utils.loss_scale import share_scale
from miles.backends.megatron_utils.streaming import StreamedInner, gradients_away, stream_state
from miles.backends.training_utils import optimizer_state
from miles.backends.training_utils.schedule import learning_rate_at
from miles.backends.training_utils.streamed_optimizer import MEAN, SQUARE, streamed_moments
from miles.config.offload import OffloadConfig
from miles.config.optimizer import OptimizerConfig
from miles.contracts.types import StepStats


class Schedule(OptimizerParamScheduler):
    """Megatron's schedule object with the rates of ``training_utils/schedule.py``, counted in
    optimizer steps."""

    def __init__(
        self, optimizer: Any, args: argparse.Namespace, config: OptimizerConfig, total_steps: int
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        decay_steps = max(1, config.lr_decay_iters or total_steps)
        super().__init__(
            optimizer,
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=min(config.lr_warmup_iters, decay_steps - 1),
            lr_decay_steps=decay_steps,
            lr_decay_style=config.lr_decay_style,
            start_wd=args.start_weight_decay,
            end_wd=args.end_weight_decay,
            wd_incr_steps=max(1, total_steps),
            wd_incr_style=args.weight_decay_incr_style,
            # A resumed run goes on with the schedule of its own flags.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
            wsd_decay_steps=config.lr_wsd_decay_iters,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The rate of the step that follows ``num_steps`` completed ones. A group may have a peak
        and a floor of its own (``--decoupled-lr``)."""
        config = replace(
            self._config,
            lr=param_group.get("max_lr", self._config.lr),
            min_lr=param_group.get("min_lr", self._config.min_lr),
        )
        return learning_rate_at(self.num_steps, config, self._total_steps)

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return self.get_lr({})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the position in ``state_dict``, whatever the position is now."""
        self.num_steps = 0
        super().load_state_dict(state_dict)


class Optimizer:
    """Clips and applies the gradients that the schedule of micro-batches left in the buffers."""

    def __init__(
        self,
        chunks: list[nn.Module],
        args: argparse.Namespace,
        config: OptimizerConfig,
        total_steps: int,
        offload: OffloadConfig,
    ) -> None:
        """Raises ``OffloadError`` where ``offload`` wants the state on a disk that has no room."""
        self.chunks: list[Any] = chunks
        settings, overrides = _settings(args)
        streams = offload.stream_optimizer_state_to_disk
        self._streamed: list[StreamedInner] = []
        with host_adam.built_in(settings), gradients_away(self.chunks if streams else []):
            self.megatron: Any = get_megatron_optimizer(
                settings,
                self.chunks,
                config_overrides=overrides,
                use_gloo_process_groups=args.use_gloo_process_groups,
            )
            number_marked_parameters(self.megatron)
            if streams:
                self._streamed = stream_state(self.megatron, offload)
        self._scale = share_scale(self.megatron.chained_optimizers)
        self._connect_held_mains()
        self._moments = _moment_dtypes(args, offload)
        self.schedule = Schedule(self.megatron, args, config, total_steps)
        self._clip = config.clip_grad
        self._connect(args)

    def zero_grad(self) -> None:
        """Empty the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, sums: dict[str, float]) -> StepStats:
        """Take one step with the gradients in the buffers; ``sums`` are those of
        ``PolicyModel.forward_backward``. Collective.

        When the global gradient norm is not finite, weights and moments stay as they are on every
        rank alike; the schedule moves on, so that the learning rate depends on the position in the
        run alone.
        """
        overflow = bool(self.megatron.prepare_grads())
        if self._scale is not None:
            self._scale.end_step()
        grad_norm = math.inf if overflow else float(self.megatron.get_grad_norm())
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._clip_gradients(grad_norm)
            self.megatron.step_with_ready_grads()
        # The master parameters' gradients are views of the buffers, or copies of them.
        self.megatron.zero_grad()
        learning_rate = self.schedule.rate
        self.schedule.step(1)
        others = {key: value for key, value in sums.items() if key}
        return StepStats(
            loss=sums[""],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
            sums=others,
        )

    def reset(self) -> None:
        """Forget the moments and their step count; the schedule goes on."""
        for part in self.parts():
            for group in part.param_groups:
                if "step" in group:
                    group["step"] = 0
            if isinstance(part, StreamedInner):
                part.zero_moments()
                continue
            for state in part.state.values():
                for kind in ("exp_avg", "exp_avg_sq"):
                    if kind in state:
                        state[kind].zero_()

    def parts(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers over this rank's shards: dense parameters, then experts."""
        return [
            part.optimizer
            for part in self.megatron.chained_optimizers
            if not part.is_stub_optimizer
        ]

    def described(self) -> dict[str, Any]:
        """The form of the state, for the metadata of a checkpoint."""
        return optimizer_state.described(self._moments, streamed=bool(self._streamed))

    def resident_tensors(self) -> dict[str, Tensor]:
        """What the optimizer holds on the device beside the model's: master parameters, moments."""
        if self._streamed:
            return {}
        elsewhere = {
            id(value)
            for part in self.parts()
            if isinstance(part, host_adam.HostAdam)
            for parameter, state in part.state.items()
            if part.in_host_memory(parameter)
            for value in state.values()
        }
        return {k: v for k, v in self.state_tensors().items() if id(v) not in elsewhere}

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that the optimizer holds beside the model's, wherever it lies."""
        tensors: dict[str, Tensor] = {}
        for number, part in enumerate(self.parts()):
            parameters = [p for group in part.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                prefix = f"{number}.{index}"
                tensors[prefix] = parameter
                for kind, value in part.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"{prefix}.{kind}"] = value
        return tensors

    def restore_parameters(self) -> None:
        """Make the model's parameters anew from the master weights. Collective."""
        for part in self.megatron.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            part._copy_main_params_to_model_params()
            if isinstance(part.optimizer, host_adam.HostAdam):
                part.optimizer.restore_parameters()
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        for inner in self._streamed:
            inner.close()

    def _connect(self, args: argparse.Namespace) -> None:
        """What the schedules of micro-batches take from the model's config."""
        config: Any = get_model_config(self.chunks[0])
        config.grad_scale_func = self.megatron.scale_loss
        if args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            if args.align_grad_reduce:
                config.grad_sync_func = _one_or_all([c.start_grad_sync for c in self.chunks])
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = _one_or_all([c.start_param_sync for c in self.chunks])

    def _connect_held_mains(self) -> None:
        """Where Adam itself holds the main parameters, ``reload_model_params`` of megatron-core
        0.19 leaves them as they are."""
        for part in self.megatron.chained_optimizers:
            if part.is_stub_optimizer or not _holds_mains(part):
                continue
            part._copy_model_params_to_main_params = partial(_read_parameters, part.optimizer)
            if isinstance(part.optimizer, host_adam.HostAdam):
                part.optimizer.allocate()

    def _clip_gradients(self, grad_norm: float) -> None:
        if self._clip <= 0:
            return
        for part in self.megatron.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters, self._clip, grad_norm, use_decoupled_grad=_holds_mains(part)
                )


def _holds_mains(part: Any) -> bool:
    """Whether the Adam of this part holds the main parameters, and reads ``decoupled_grad``."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def _read_parameters(adam: Any, state_dict: None = None) -> None:
    assert state_dict is None, "weights are loaded into the model first"
    read_parameters(adam)


def _settings(args: argparse.Namespace) -> tuple[Any, dict[Any, Any]]:
    """Megatron's optimizer config, and what differs from it for some parameters."""
    made: Any = get_megatron_optimizer_config(args)
    settings, overrides = made
    # Weight decay reaches norms and biases too: both backends train alike.
    return settings, {key: value for key, value in overrides.items() if "wd_mult" not in value}


def _moment_dtypes(args: argparse.Namespace, offload: OffloadConfig) -> dict[str, torch.dtype]:
    if offload.stream_optimizer_state_to_disk:
        return streamed_moments(offload)
    narrow = args.use_precision_aware_optimizer
    dtypes = {MEAN: args.exp_avg_dtype, SQUARE: args.exp_avg_sq_dtype}
    return dtypes if narrow else dict.fromkeys(dtypes, torch.float32)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
