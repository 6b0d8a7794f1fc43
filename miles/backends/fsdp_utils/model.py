"""The Hugging Face model under FSDP2: load, shard, and the forward pass to token statistics.

Nothing about the model is re-expressed: ``config.json`` decides the class, rank 0 reads the
weights, the other ranks start on the meta device and receive their shards.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles.backends.fsdp_utils import attention, sharding
from miles.backends.fsdp_utils.precision import Precision
from miles.backends.fsdp_utils.weights import (
    Weight,
    dtypes_by_key,
    match_weights,
    model_tensors,
)
from miles.backends.training_utils.hf_files import checkpoint_dtypes
from miles.backends.training_utils.logprobs import token_stats, token_stats_from_logits
from miles.backends.training_utils.packing import padded_inputs
from miles.config.errors import ConfigError, Problem
from miles.contracts.types import MicroBatch, TokenStats
from miles.core import device, distributed, logging
from miles.core.hf import CheckpointDirError, load_config, padding_id

log = logging.get(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is built, beside what its directory says."""

    precision: Precision
    flag: str = "--hf-checkpoint"
    """Which named the directory, for errors."""
    attention: str | None = None
    """``--attn-implementation``."""
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    """``--fsdp-cpu-offload``: shards live in host memory and are gathered on the device."""

    def offload_policy(self) -> OffloadPolicy:
        """Pinned where there is a device that copies from the shards: pinning needs one."""
        if not self.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.has_accelerator())


@dataclass(frozen=True)
class HeadOptions:
    """How logits become log-probs."""

    temperature: float
    chunk_size: int
    """See ``training_utils.logprobs.token_stats``."""


class ShardedModel:
    """A causal language model whose parameters are sharded over the mesh."""

    def __init__(
        self, module: PreTrainedModel, weights: list[Weight], options: LoadOptions
    ) -> None:
        self.module: Any = module
        self.weights = weights
        self.precision = options.precision
        self.flag = options.flag
        self.attention = attention.implementation(module)
        self.fuse_head = True
        """Whether logits are the head's output as it is; ``self_check.py`` finds out."""
        head = module.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                [Problem(options.flag, type(module).__name__, "has no language-model head")]
            )
        self._head = head
        self._pad_id = padding_id(module.config) or 0

    def token_stats(
        self, batch: MicroBatch, options: HeadOptions, *, with_entropy: bool
    ) -> TokenStats:
        """Forward pass; float32 ``[R]`` with gradient (unless disabled).

        Collective: every rank runs the same number of micro-batches, fillers included.
        """
        inputs, flat_index_R = self._inputs(batch)

        def gather(hidden_SxLxH: Tensor) -> Tensor:
            return hidden_SxLxH.flatten(0, 1).index_select(0, flat_index_R)

        def fused(hidden_SxLxH: Tensor) -> Tensor:
            stats = token_stats(
                gather(hidden_SxLxH),
                self._head.weight,
                batch.targets_R,
                bias=self._head.bias,
                temperature=options.temperature,
                chunk_size=options.chunk_size,
                with_entropy=with_entropy,
            )
            entropy = () if stats.entropy_R is None else (stats.entropy_R,)
            return torch.stack([stats.log_probs_R, *entropy])

        def plain(hidden_SxLxH: Tensor) -> Tensor:
            # The leading axis is the batch axis that the model's own code may rely on.
            return functional.linear(gather(hidden_SxLxH), self._head.weight, self._head.bias)[None]

        # The statistics leave through the root module's output: FSDP2 hangs its backward on that.
        if self.fuse_head:
            rows = self._call(inputs, fused)
            return TokenStats(log_probs_R=rows[0], entropy_R=rows[1] if with_entropy else None)
        logits_RxV = self._call(inputs, plain)[0]
        return token_stats_from_logits(
            logits_RxV,
            batch.targets_R,
            temperature=options.temperature,
            chunk_size=options.chunk_size,
            with_entropy=with_entropy,
        )

    def logits_and_head_output(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's logits of a micro-batch and what its head alone gave; without gradient."""
        inputs, _ = self._inputs(batch)
        seen: list[Tensor] = []

        def record(hidden_SxLxH: Tensor) -> Tensor:
            out = functional.linear(hidden_SxLxH, self._head.weight, self._head.bias)
            seen.append(out)
            return out

        with torch.no_grad():
            logits = self._call(inputs, record)
        self.reshard()
        return logits, seen[0]

    def persistent_tensors(self) -> dict[str, Tensor]:
        """Parameters and the buffers that belong to a checkpoint; the live tensors."""
        kept = self.module.state_dict().keys()
        return {key: t for key, t in model_tensors(self.module).items() if key in kept}

    def reshard(self) -> None:
        """Undo what a forward pass without backward leaves: the root's parameters are gathered, and
        FSDP2 has noted the order of all units for the backward pass, whose end forgets it."""
        for module in self.module.modules():
            if not isinstance(module, FSDPModule):
                continue
            module.reshard()
            group: Any = module._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
            if group is not None:
                group.comm_ctx.post_forward_order.clear()
                group._post_forward_indices.clear()

    def _call(self, inputs: dict[str, Any], head: Callable[[Tensor], Tensor]) -> Tensor:
        with _replaced_forward(self._head, head):
            return self.module(**inputs, use_cache=False).logits

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        if batch.packed:
            documents = attention.packed_arguments(
                self.attention, batch.cu_seqlens_S, batch.max_seqlen
            )
            row = {
                "input_ids": batch.tokens_T[None],
                "position_ids": batch.position_ids_T[None],
            }
            return row | documents, batch.logit_index_R
        # Padding is on the right: causality keeps it out, so that no mask is needed.
        input_ids, _, position_ids, flat_index_T = padded_inputs(batch, self._pad_id)
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        return inputs, flat_index_T[batch.logit_index_R]


_LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_model(path: str, mesh: DeviceMesh, options: LoadOptions) -> ShardedModel:
    """Load a Hugging Face directory into a sharded model in training mode; collective.

    Raises ``ConfigError`` or ``CheckpointDirError`` on every rank when the directory or the flags
    do not fit together.
    """
    precision = options.precision
    module = _build_on_meta(path, options)
    weights, source = _read_on_first_rank(path, module)
    stored = _stored_dtypes(module, weights, precision)
    if not precision.frozen:
        _check_trainable(set(stored.values()))
    for key, parameter in module.named_parameters():
        parameter.data = parameter.data.to(stored[key])
        if source:
            source[key] = source[key].to(stored[key])
    module.requires_grad_(not precision.frozen)
    sharding.shard(module, mesh, precision.mixed_precision_policy(), options.offload_policy())
    # With shards in host memory they are filled there too: one device for all that is broadcast.
    module.to_empty(device="cpu" if options.cpu_offload else device.current_device())
    module.tie_weights()
    _fill(module, source)
    _move_buffers(module, device.current_device())
    module.train()
    exported = [replace(w, dtype=precision.exported(w.dtype)) for w in weights]
    return ShardedModel(module, exported, options)


def _build_on_meta(path: str, options: LoadOptions) -> PreTrainedModel:
    hf_config = load_config(path)
    if getattr(hf_config, "quantization_config", None) is not None:
        raise CheckpointDirError(f"{path!r} is quantized; convert it to bf16 first")
    _switch_off_dropout(hf_config)
    attention.check_requested(options.attention)
    with torch.device("meta"):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=torch.float32,
            attn_implementation=options.attention,
            trust_remote_code=True,
        )
    attention.install(module, options.attention, options.precision.compute)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if options.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def _switch_off_dropout(hf_config: Any) -> None:
    """Log-probs and the loss must come from the same function of the weights."""
    text_config = hf_config.get_text_config()
    for key, value in text_config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0:
            log.info("config.json: %s = %s is ignored, training runs without dropout", key, value)
            setattr(text_config, key, 0.0)


def _read_on_first_rank(
    path: str, module: PreTrainedModel
) -> tuple[list[Weight], dict[str, Tensor]]:
    """The weight table everywhere; real tensors, in fp32, on rank 0 alone."""
    weights: list[Weight] = []
    tensors: dict[str, Tensor] = {}

    def read() -> None:
        weights.extend(match_weights(module, checkpoint_dtypes(path), path))
        tensors.update(_read(path))

    error = distributed.error_of(read) if distributed.rank() == 0 else None
    distributed.raise_together(error, f"loading {path}")
    return distributed.broadcast_object(weights), tensors


def _stored_dtypes(
    module: nn.Module, weights: list[Weight], precision: Precision
) -> dict[str, torch.dtype]:
    """Of the parameters. Buffers stay as they are: no gather casts them, and a router that adds a
    rounded one to its scores picks other experts."""
    dtypes = dtypes_by_key(weights)
    return {key: precision.stored(dtypes[key]) for key, _ in module.named_parameters()}


def _read(path: str) -> dict[str, Tensor]:
    """All parameters and buffers in fp32, which holds every trainable dtype exactly."""
    result: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=True,
        # Told below, with the names.
        ignore_mismatched_sizes=True,
    )
    loaded, info = result
    _require_fit(path, loaded, info)
    if info.get("unexpected_keys"):
        log.info("%s: not part of the model: %s", path, sorted(info["unexpected_keys"])[:5])
    return model_tensors(loaded)


def _require_fit(path: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise ``CheckpointDirError`` where ``config.json`` describes another model than the files
    hold: other sizes, or fewer layers, which would be trained without the rest."""
    shapes = sorted(
        f"{name} is {tuple(held)} in the files and {tuple(described)} by config.json"
        for name, held, described in info.get("mismatched_keys") or ()
    )
    layers = model.config.get_text_config().num_hidden_layers
    beyond = sorted(
        f"{name} is in the files, but config.json has {layers} layers"
        for name in info.get("unexpected_keys") or ()
        if (found := _LAYER.search(name)) and int(found[1]) >= layers
    )
    others = [
        f"{kind} {sorted(map(str, info[kind]))[:5]}"
        for kind in ("missing_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems := [*shapes[:3], *beyond[:3], *others]:
        raise CheckpointDirError(f"{path!r}: its weights do not fit: {'; '.join(problems)}")


def _check_trainable(stored: set[torch.dtype]) -> None:
    remedy = None
    if len(stored) > 1:
        kinds = ", ".join(sorted(str(dtype) for dtype in stored))
        remedy = f"the checkpoint mixes {kinds}, which FSDP2 cannot shard"
    elif torch.float16 in stored:
        remedy = "the checkpoint is fp16, in which Adam's second moment underflows"
    if remedy is not None:
        remedy += ": keep the fp32 master"
        raise ConfigError([Problem("--no-keep-fp32-master", True, remedy)])


def _fill(module: PreTrainedModel, source: dict[str, Tensor]) -> None:
    """Send rank 0's tensors to every rank's shards.

    Buffers go by hand: those that no checkpoint holds (rotary frequencies) have no state-dict
    entry, and initialisation on the meta device has lost their values.
    """
    state: dict[str, Any] = {}
    if source:
        state = {key: source[key] for key, _ in module.named_parameters()}
    # Not strict: the second name of a tied parameter and the buffers have no entry.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, state, options=options)
    for key, buffer in module.named_buffers():
        if source:
            buffer.copy_(source[key])
        if distributed.world_size() > 1:
            dist.broadcast(buffer, 0)


def _move_buffers(module: nn.Module, where: torch.device) -> None:
    """FSDP gathers parameters on the device, but uses buffers where they are."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(where))


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Run ``forward`` in place of the module's own, hooks and surroundings unchanged."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
