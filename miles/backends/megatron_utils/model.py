"""Micro-batches through Megatron's chunks and schedules: log-probs, and gradients in the buffers.

Every rank gets the same answers: log-probs of all response tokens, whatever part of the layers, of
the vocabulary or of the sequences it holds.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from miles.backends.megatron_utils.head import Head, HeadOptions, Request
from miles.backends.megatron_utils.layout import (
    Axes,
    ModelInput,
    filler_like,
    model_input,
    num_tokens,
)
from miles.backends.megatron_utils.router import mean_losses
from miles.contracts.parallel import ParallelState
from miles.contracts.types import LossFn, MicroBatch, TokenStats
from miles.core import device

mpu: Any = parallel_state


class PolicyModel:
    """The chunks of this rank, as a function from micro-batches to log-probs and gradients."""

    def __init__(
        self,
        chunks: list[Any],
        args: argparse.Namespace,
        parallel: ParallelState,
        options: HeadOptions,
    ) -> None:
        self.chunks: list[Any] = chunks
        self.config: Any = get_model_config(chunks[0])
        self._parallel = parallel
        self._head = Head(args.vocab_size, options)
        self._axes = Axes(
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            sequence_split=parallel.tp_size if self.config.sequence_parallel else 1,
        )
        self._is_last_stage = mpu.is_pipeline_last_stage()
        self._parameters_lag = False
        self.config.finalize_model_grads_func = _finalize_gradients

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """float32 ``[R]`` log-probs of each micro-batch, without gradient. Collective."""

        def keep(batch: MicroBatch, stats: Tensor, *, non_loss_data: bool) -> Tensor:
            del batch, non_loss_data
            return stats[0]

        with torch.no_grad():
            found = self._run(batches, keep, with_entropy=False, forward_only=True)
        counts = [len(batch.targets_R) for batch in batches]
        flat = torch.empty(sum(counts), device=device.current_device())
        if self._is_last_stage:
            flat = torch.cat(found)
        if self._parallel.pp_size > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(flat, last, group=mpu.get_pipeline_model_parallel_group())
        return list(flat.split(counts))

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossFn, *, with_entropy: bool
    ) -> dict[str, float]:
        """Add the gradient of the summed loss over all ranks to the gradient buffers. Collective.

        Returns ``LossOutput.sums`` added up over micro-batches and data-parallel ranks, the loss
        under ``""``, and the means of the routers' losses; the same on every rank.
        """
        total_tokens = self._set_auxiliary_scale(batches)
        totals: dict[str, Tensor] = {}

        def weigh(batch: MicroBatch, stats: Tensor) -> tuple[Tensor, Tensor, None]:
            entropy_R = stats[1] if with_entropy else None
            output = loss(batch, TokenStats(log_probs_R=stats[0], entropy_R=entropy_R))
            _add(totals, {**output.sums, "": output.loss})
            value = output.loss
            if not value.requires_grad:
                # Nothing to learn here, but the backward pass takes part in the collectives.
                value = value + stats[0, :0].sum()
            return value, torch.zeros((), dtype=torch.int, device=value.device), None

        self._run(batches, weigh, with_entropy=with_entropy, forward_only=False)
        return self._everywhere(totals) | mean_losses(self.chunks, self.config, total_tokens)

    def parameters_changed(self) -> None:
        """Tell that the optimizer updated this rank's shards. Where their gather overlaps with the
        next forward pass, that pass has to start it."""
        if self._overlaps_gather():
            self._parameters_lag = True
            for chunk in self.chunks:
                chunk.reset_param_sync_dispatch_state()

    def synchronize_parameters(self) -> None:
        """Finish the gather of updated shards that would else overlap with the next forward pass:
        afterwards every rank's parameters are whole. Collective."""
        if self._parameters_lag:
            self._parameters_lag = False
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _overlaps_gather(self) -> bool:
        return bool(self.chunks[0].ddp_config.overlap_param_gather)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        finish: Callable[..., Any],
        *,
        with_entropy: bool,
        forward_only: bool,
    ) -> list[Any]:
        """What ``finish`` returned last for each micro-batch, on the last stage."""
        entries = [*batches, *self._fillers(batches)]

        def step(
            iterator: Iterator[MicroBatch], chunk: nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            return self._forward(chunk, batch, with_entropy), partial(finish, batch)

        iterators = [iter(entries) for _ in self.chunks]
        run = get_forward_backward_func()
        found = run(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(entries),
            # Lengths travel with the tensors.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self._parameters_lag = False
        return found[: len(batches)]

    def _fillers(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The interleaved schedule takes groups of micro-batches."""
        if len(self.chunks) == 1:
            return []
        missing = -len(batches) % self.config.microbatch_group_size_per_vp_stage
        return [filler_like(batches[0])] * missing

    def _forward(self, chunk: nn.Module, batch: MicroBatch, with_entropy: bool) -> Tensor:
        inputs = model_input(batch, self._axes)
        return chunk(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=inputs.packed_seq_params,
            padding_mask=self._padding_mask(chunk, inputs),
            output_processor=self._head,
            output_processor_context=Request(batch, inputs, with_entropy),
        )

    def _padding_mask(self, chunk: nn.Module, inputs: ModelInput) -> Tensor | None:
        """For the routers. Megatron splits it over a sequence-parallel group only where the
        embedding is."""
        if self.config.num_moe_experts is None:
            return None
        split = self._axes.sequence_split
        if split == 1 or get_attr_wrapped_model(chunk, "pre_process"):
            return inputs.padding_mask
        rank = mpu.get_tensor_model_parallel_rank()
        return inputs.padding_mask.chunk(split, dim=1)[rank].contiguous()

    def _set_auxiliary_scale(self, batches: Sequence[MicroBatch]) -> float:
        """A router's loss is weighted by its micro-batch's tokens: divide by those of the step,
        which are returned."""
        if self.config.num_moe_experts is None:
            return 0.0
        count = torch.tensor(
            sum(map(num_tokens, batches)), dtype=torch.float64, device=device.current_device()
        )
        total = max(float(self._parallel.dp_sum(count)), 1.0)
        one = torch.ones(1, device=device.current_device())
        self.config.moe_grad_scale_func = lambda: self.config.grad_scale_func(one) / total
        return total

    def _everywhere(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over data-parallel ranks, from the last stage to all."""
        summed: dict[str, float] = {}
        if self._is_last_stage:
            keys = sorted(totals)
            values = self._parallel.dp_sum(torch.stack([totals[key] for key in keys]))
            summed = dict(zip(keys, values.tolist(), strict=True))
        if self._parallel.pp_size == 1:
            return summed
        box: list[Any] = [summed]
        last = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, last, group=mpu.get_pipeline_model_parallel_group())
        return box[0]


def _finalize_gradients(chunks: list[nn.Module], num_tokens: Any = None, **how: Any) -> None:
    """Megatron's own reductions without its division by the number of tokens."""
    del num_tokens
    finalize_model_grads(chunks, None, **how)


def _add(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """In float64: counts of tokens stay exact beyond 2^24."""
    for key, value in sums.items():
        wide = value.detach().to(device.current_device(), torch.float64)
        totals[key] = totals[key] + wide if key in totals else wide
