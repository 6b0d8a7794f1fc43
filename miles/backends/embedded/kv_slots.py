"""Key/value slots of the running sequences, and the attention that reads and writes them.

Row ``i`` of a batch owns slot ``i``; running rows are always ``0 .. N-1``, so a decode step attends
on plain views of the slabs instead of gathered copies. Shape letters: ``N`` rows, ``T`` tokens of
the step, ``H`` query heads, ``K`` key/value heads, ``L`` cached tokens, ``D`` head size.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor


class UnsupportedModelError(ValueError):
    """The architecture needs something that the key/value slots do not have."""


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """Neighbouring prompts of one length in the packed tokens of a step."""

    start: int
    """Position of the first token in the step."""
    length: int
    slots: "Tensor"
    """int64: the slot of each prompt."""

    @property
    def stop(self) -> int:
        return self.start + self.length * len(self.slots)


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """How the packed tokens of a step are laid out: one for each decoding row, then prompts."""

    num_decode: int
    rows: "Tensor"
    """int64 ``[num_decode]``: 0 .. num_decode - 1."""
    lengths: "Tensor"
    """int64 ``[num_decode]``: tokens that the slot holds before the step."""
    max_length: int
    """Longest slot of a decoding row after the step."""
    mask: "Tensor | None"
    """bool ``[num_decode, 1, 1, max_length]``; ``None`` when all rows are equally long."""
    prompts: tuple[PromptRun, ...]


@dataclass(slots=True)
class _Slab:
    keys: "Tensor"
    """``[slots, K, capacity, D]``."""
    values: "Tensor"


@dataclass
class KVSlots:
    """Slabs of all layers. They are made on the first step, when the layers' sizes are seen."""

    context_length: int
    num_slots: int = 0
    capacity: int = 0
    """Tokens that a slot can hold."""
    layout: StepLayout | None = None
    """Layout of the step being run; read by ``attend``."""
    _slabs: dict[int, _Slab] = field(default_factory=dict[int, _Slab])

    @property
    def layers(self) -> frozenset[int]:
        """Layers that have attended since the slabs were dropped."""
        return frozenset(self._slabs)

    @property
    def bytes_per_token(self) -> int:
        return sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size()
            for slab in self._slabs.values()
            for tensor in (slab.keys, slab.values)
        )

    def reserve(self, num_slots: int, capacity: int, num_rows: int, length: int) -> None:
        """Give the slabs these sizes, keeping ``length`` tokens of the first ``num_rows`` slots."""
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        self.num_slots, self.capacity = num_slots, capacity
        for slab in self._slabs.values():
            slab.keys = _resized(slab.keys, num_slots, capacity, num_rows, length)
            slab.values = _resized(slab.values, num_slots, capacity, num_rows, length)

    def drop(self) -> None:
        """Free all slabs."""
        self._slabs.clear()
        self.num_slots = self.capacity = 0

    def copy(self, source: "Tensor", target: "Tensor", length: int) -> None:
        """Copy the first ``length`` tokens of slots; the two int64 lists run in step."""
        for slab in self._slabs.values():
            for tensor in (slab.keys, slab.values):
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slots: "Tensor") -> None:
        """Zero slots. A value that is not finite would reach later owners of the slot: a masked
        position has weight 0, and 0 times NaN is NaN."""
        for slab in self._slabs.values():
            slab.keys[slots] = 0
            slab.values[slots] = 0

    def attend(
        self,
        module: torch.nn.Module,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        attention_mask: "Tensor | None",
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple["Tensor", None]:
        """Store the step's keys and values and attend. ``query`` is ``[1, H, T, D]``; returns
        ``[1, T, H, D]``."""
        layout = self.layout
        assert layout is not None, "attend was called outside a step"
        slab = self._slab(module, key, value, kwargs)
        outputs: list[Tensor] = []
        if layout.num_decode:
            outputs.append(_decode(layout, slab, query[0], key[0], value[0], scaling))
        outputs.extend(
            _prefill(run, slab, query[0], key[0], value[0], scaling) for run in layout.prompts
        )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None

    def _slab(
        self, module: torch.nn.Module, key: "Tensor", value: "Tensor", kwargs: dict[str, Any]
    ) -> _Slab:
        layer: Any = module.layer_idx
        if layer not in self._slabs:
            self._check(kwargs)
            # Zeros, for the reason that `clear` gives; untouched pages cost nothing on a CPU.
            self._slabs[layer] = _Slab(
                *(
                    torch.zeros(
                        (self.num_slots, x.shape[1], self.capacity, x.shape[3]),
                        dtype=x.dtype,
                        device=x.device,
                    )
                    for x in (key, value)
                )
            )
        return self._slabs[layer]

    def _check(self, kwargs: dict[str, Any]) -> None:
        window = kwargs.get("sliding_window")
        if window is not None and window < self.context_length:
            raise UnsupportedModelError(
                f"the model attends to a sliding window of {window} tokens; "
                f"give --context-length {window} or less"
            )
        for name in ("softcap", "s_aux", "position_bias", "sinks"):
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"the model's attention uses {name!r}")


def _resized(
    tensor: "Tensor", num_slots: int, capacity: int, num_rows: int, length: int
) -> "Tensor":
    grown = tensor.new_zeros((num_slots, tensor.shape[1], capacity, tensor.shape[3]))
    grown[:num_rows, :, :length] = tensor[:num_rows, :, :length]
    return grown


def _decode(
    layout: StepLayout,
    slab: _Slab,
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    scaling: float | None,
) -> "Tensor":
    """One token a row: ``[H or K, T, D]`` in, ``[num_decode, H, D]`` out."""
    count, length = layout.num_decode, layout.max_length
    slab.keys[layout.rows, :, layout.lengths] = key[:, :count].transpose(0, 1)
    slab.values[layout.rows, :, layout.lengths] = value[:, :count].transpose(0, 1)
    # The query heads of a group become query positions of their key/value head: nothing is
    # repeated, and the kernel reads each cached token once.
    grouped = query[:, :count].unflatten(0, (key.shape[0], -1)).permute(2, 0, 1, 3)
    attended = scaled_dot_product_attention(
        grouped,
        slab.keys[:count, :, :length],
        slab.values[:count, :, :length],
        attn_mask=layout.mask,
        scale=scaling,
    )
    return attended.flatten(1, 2)


def _prefill(
    run: PromptRun,
    slab: _Slab,
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    scaling: float | None,
) -> "Tensor":
    """Whole prompts of one length: ``[H or K, T, D]`` in, ``[prompts * length, H, D]`` out."""
    query, key, value = (
        x[:, run.start : run.stop].unflatten(1, (len(run.slots), run.length)).transpose(0, 1)
        for x in (query, key, value)
    )
    slab.keys[run.slots, :, : run.length] = key
    slab.values[run.slots, :, : run.length] = value
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).flatten(0, 1)
