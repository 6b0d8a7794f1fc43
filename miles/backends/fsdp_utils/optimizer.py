"""AdamW, its learning-rate schedule, and the optimizer step over sharded gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from miles.backends.fsdp_utils.model import ShardedModel
from miles.backends.fsdp_utils.sharding import UsedParameters
from miles.backends.training_utils import optimizer_state
from miles.backends.training_utils.offload_store import local_tensor
from miles.backends.training_utils.schedule import learning_rate_at
from miles.backends.training_utils.streamed_optimizer import AdamShard, StreamedAdam
from miles.config.derived import total_optimizer_steps
from miles.config.offload import OffloadConfig
from miles.config.root import MilesConfig
from miles.contracts.parallel import ParallelState
from miles.contracts.types import LossFn, MicroBatch, StepStats, TokenStats
from miles.core import device

MOMENTS = ("exp_avg", "exp_avg_sq")


class LossScale:
    """Dynamic loss scale of fp16 training: halved by an overflow, doubled after 2000 good steps.

    Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    INITIAL = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = self.INITIAL if enabled else 1.0
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0


class _StreamedAdamW(AdamW):
    """Settings, schedule and step counts are AdamW's; moments and the update are elsewhere."""

    update: Callable[[], None]

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "gradients are there before the step"
        self.update()


class Optimizer:
    """One step at a time: accumulate, reduce, clip, update."""

    def __init__(self, model: ShardedModel, config: MilesConfig, parallel: ParallelState) -> None:
        """Raises ``OffloadError`` where the moments are to lie on a disk that has no room.

        The master weights are the parameters themselves, which every forward pass needs: they stay.
        """
        options, total_steps = config.optimizer, total_optimizer_steps(config)
        self._model = model
        self._used = UsedParameters(model.module)
        self._clip = options.clip_grad
        self._shards_gradients = config.fsdp.accumulate_sharded_gradients
        self._parallel = parallel
        self._num_replicas = config.fsdp.dp_replicate_size
        self._fused = device.supports_fused_optimizer()
        self.names: dict[str, Tensor] = dict(model.module.named_parameters())
        # A rate of 1 that the schedule multiplies: the product is exactly what the schedule says.
        streams = config.offload.stream_optimizer_state_to_disk
        self.adam = (_StreamedAdamW if streams else AdamW)(
            self.names.values(),
            lr=1.0,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=self._fused,
        )
        self.schedule = LambdaLR(
            self.adam, lambda step: learning_rate_at(step, options, total_steps)
        )
        self.scale = LossScale(model.precision.scales_loss)
        self._streamed: StreamedAdam | None = None
        if isinstance(self.adam, _StreamedAdamW):
            self._streamed = self._stream_from(config.offload)
            self.adam.update = self._update_streamed
        self._initialise_state()

    def step(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFn,
        forward: Callable[[MicroBatch], TokenStats],
    ) -> StepStats:
        """Take one step on the sum of the losses of ``batches`` over all ranks; collective.

        Gradients of micro-batches accumulate on each rank and are reduced with the last one, or,
        under --accumulate-sharded-gradients, are reduced one by one to shards, which accumulate in
        the dtype of the stored parameters; replicas (--dp-replicate-size) add up theirs at the end.

        When the global gradient norm is not finite, weights and moments stay as they are on every
        rank alike; the schedule moves on, so that the learning rate depends on the position in the
        run alone.
        """
        self.adam.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for position, batch in enumerate(batches):
            last = position == len(batches) - 1
            self._model.module.set_requires_gradient_sync(last or self._shards_gradients)
            self._model.module.set_requires_all_reduce(last)
            self._model.module.set_is_last_backward(last)
            stats = forward(batch)
            output = loss(batch, stats)
            value = output.loss
            if not value.requires_grad:
                # Nothing to learn here, but the backward pass takes part in the collectives.
                value = value + stats.log_probs_R[:0].sum()
            (value * self.scale.value).backward()
            _add(totals, {**output.sums, "": output.loss.detach()})
        self._used.drop_unused(self.names.values(), self._parallel)
        grad_norm = self._grad_norm()
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._rescale_gradients(grad_norm)
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.scale.update(overflow=skipped)
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        sums = self._reduce(totals)
        return StepStats(
            loss=sums.pop(""),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
            sums=sums,
        )

    def reset(self) -> None:
        """Forget the moments and their step count; the schedule goes on."""
        if self._streamed is not None:
            self._streamed.zero_moments()
        for tensor in self.resident_tensors().values():
            local_tensor(tensor).zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as ``<parameter>.<kind>``; the live tensors."""
        state = self.adam.state
        return {
            f"{name}.{kind}": state[parameter][kind]
            for name, parameter in self.names.items()
            for kind in (*MOMENTS, "step")
        }

    def described(self) -> dict[str, Any]:
        """The form of the state, for the metadata of a checkpoint."""
        state = next(iter(self.adam.state.values()))
        moments = {kind: state[kind].dtype for kind in MOMENTS}
        return optimizer_state.described(moments, streamed=self._streamed is not None)

    def resident_tensors(self) -> dict[str, Tensor]:
        """Those of ``state_tensors`` that are not on a disk."""
        if self._streamed is None:
            return self.state_tensors()
        return {k: t for k, t in self.state_tensors().items() if k.endswith(".step")}

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        if self._streamed is not None:
            self._streamed.close()

    def schedule_state(self) -> dict[str, Tensor]:
        """Position of the schedule and the loss scale, as tensors to save or to load into."""
        return {
            "step": torch.tensor(self.schedule.last_epoch),
            "loss_scale": torch.tensor(self.scale.value, dtype=torch.float64),
            "good_steps": torch.tensor(self.scale.good_steps),
        }

    def load_schedule_state(self, state: Mapping[str, Tensor], *, scaled_loss: bool) -> None:
        """Go on from there with the schedule of the present flags, and with the loss scale if the
        run that saved it had one (``scaled_loss``)."""
        position = int(state["step"])
        rate: Any = self.schedule.lr_lambdas[0]
        saved = self.schedule.state_dict()
        saved |= {"last_epoch": position, "_step_count": position + 1, "_last_lr": [rate(position)]}
        self.schedule.load_state_dict(saved)
        self.adam.param_groups[0]["lr"] = rate(position)
        if self.scale.enabled and scaled_loss:
            self.scale.value = float(state["loss_scale"])
            self.scale.good_steps = int(state["good_steps"])

    def _initialise_state(self) -> None:
        """What AdamW makes in its first step, so that it can be saved or loaded before."""
        on_device = self._fused and self._streamed is None
        for number, parameter in enumerate(self.names.values()):
            where = parameter.device if on_device else torch.device("cpu")
            if self._streamed is None:
                moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            else:
                moments = {
                    kind: _shaped_like(parameter, flat)
                    for kind, flat in self._streamed.tensors(number).items()
                }
            self.adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=where),
                **moments,
            }

    def _stream_from(self, offload: OffloadConfig) -> StreamedAdam:
        state, settings = self.adam.state, self.adam.param_groups[0]

        def shard(parameter: Tensor) -> AdamShard:
            local = local_tensor(parameter)
            return AdamShard(
                numel=local.numel(),
                gradient=lambda: None if parameter.grad is None else local_tensor(parameter.grad),
                settings=settings,
                num_steps=lambda: int(state[parameter]["step"]),
                parameter=local,
            )

        return StreamedAdam([shard(parameter) for parameter in self.names.values()], offload)

    def _update_streamed(self) -> None:
        assert self._streamed is not None
        for parameter in self.names.values():
            if parameter.grad is not None:
                self.adam.state[parameter]["step"] += 1
        self._streamed.step()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.names.values() if p.grad is not None]

    def _grad_norm(self) -> float:
        """2-norm over all parameters and ranks, without the loss scale; of bf16 gradients too it is
        computed in fp32, and summed up in fp64."""
        gradients = [local_tensor(gradient) for gradient in self._gradients()]
        square = torch.zeros((), dtype=torch.float64, device=device.current_device())
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore
            square += torch.stack(norms).double().square().sum()
        # Replicas hold the same gradients.
        square = self._parallel.dp_sum(square) / self._num_replicas
        return math.sqrt(square.item()) / self.scale.value

    def _rescale_gradients(self, grad_norm: float) -> None:
        """Take the loss scale out and clip, in one pass."""
        factor = 1.0 / self.scale.value
        if self._clip > 0:
            factor *= min(1.0, self._clip / (grad_norm + 1e-6))
        if factor != 1.0:
            gradients = [local_tensor(gradient) for gradient in self._gradients()]
            torch._foreach_mul_(gradients, factor)  # pyright: ignore

    def _reduce(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over data-parallel ranks; every rank has the same keys."""
        keys = sorted(totals)
        summed = self._parallel.dp_sum(torch.stack([totals[key] for key in keys]))
        return dict(zip(keys, summed.tolist(), strict=True))


def _shaped_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """This rank's shard ``flat`` as part of a tensor that is divided as the parameter is."""
    assert isinstance(parameter, DTensor)
    shard = flat.view(local_tensor(parameter).shape)
    # from_local would copy it to the parameter's device.
    return DTensor(shard, parameter._spec, requires_grad=False)  # pyright: ignore


def _add(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """In float64: counts of tokens stay exact beyond 2^24."""
    for key, value in sums.items():
        wide = value.detach().to(device.current_device(), torch.float64)
        totals[key] = totals[key] + wide if key in totals else wide
