"""SGLang's fused parameters: which checkpoint tensors make up each, and digests of them.

SGLang's weight checker hashes parameters of the engine. Those are tensors of the checkpoint, one
after the other in memory: queries, keys and values; gate and up; all experts of a layer. Rows of
the vocabulary are padded with zeros.
"""

# pyright: reportMissingImports=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.core import device, hf
from miles.weight_sync.checksums import feed

VOCABULARY_MULTIPLE = 64
VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})

_ATTENTION = re.compile(r"(.+\.self_attn\.)([qkv])_proj\.(\w+)")
_MLP = re.compile(r"(.+\.mlp\.)(gate|up)_proj\.(\w+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint lies in the engine."""

    parameter: str
    part: int = 0
    num_parts: int = 1


Table = Callable[[str], Place]
"""Name in the checkpoint -> place."""


def dense_place(name: str) -> Place:
    if found := _ATTENTION.fullmatch(name):
        return Place(f"{found[1]}qkv_proj.{found[3]}", "qkv".index(found[2]), 3)
    if found := _MLP.fullmatch(name):
        return Place(f"{found[1]}gate_up_proj.{found[3]}", int(found[2] == "up"), 2)
    return Place(name)


def moe_place(name: str, *, num_experts: int) -> Place:
    found = _EXPERT.fullmatch(name)
    if found is None:
        return dense_place(name)
    expert = int(found[2])
    if found[3] == "down":
        return Place(f"{found[1]}.w2_weight", expert, num_experts)
    return Place(f"{found[1]}.w13_weight", 2 * expert + (found[3] == "up"), 2 * num_experts)


def _dense_table(config: Any) -> Table:
    return dense_place


def _moe_table(config: Any) -> Table:
    return partial(moe_place, num_experts=config.num_experts)


TABLES: Mapping[str, Callable[[Any], Table]] = {
    "LlamaForCausalLM": _dense_table,
    "Qwen2ForCausalLM": _dense_table,
    "Qwen3ForCausalLM": _dense_table,
    "Qwen3MoeForCausalLM": _moe_table,
}
"""By the architecture in ``config.json``, which is how SGLang picks its model."""


def fuse_table(config: Any) -> Table | None:
    """The table of a model by its transformers config; ``None`` for a family that has none."""
    make = TABLES.get(hf.architecture(config))
    return None if make is None else make(config)


class FusedDigests:
    """Digests of the engine's parameters, from the checkpoint's tensors in any order.

    ``dtype`` is the engine's: it casts what it loads. Parts wait as copies until their parameter
    is whole.
    """

    def __init__(self, table: Table, dtype: torch.dtype) -> None:
        self._table = table
        self._dtype = dtype
        self._waiting: dict[str, dict[int, Tensor]] = {}
        self._expected: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        place = self._table(name)
        loaded = tensor.detach().to(self._dtype, copy=place.num_parts > 1)
        if place.num_parts == 1:
            self._digests[place.parameter] = sglang_digest([loaded, *_padding(name, loaded)])
            return
        parts = self._waiting.setdefault(place.parameter, {})
        parts[place.part] = loaded
        self._expected[place.parameter] = place.num_parts
        if len(parts) == place.num_parts:
            del self._waiting[place.parameter]
            self._digests[place.parameter] = sglang_digest([parts[i] for i in sorted(parts)])

    def result(self) -> Mapping[str, str]:
        """A parameter that is not whole has, instead of a digest, what is missing."""
        unfinished = {
            name: f"sent {len(parts)} of {self._expected[name]} parts"
            for name, parts in self._waiting.items()
        }
        return self._digests | unfinished


def _padding(name: str, tensor: Tensor) -> list[Tensor]:
    """The rows of zeros behind those of the vocabulary."""
    if name not in VOCABULARY:
        return []
    return [tensor.new_zeros(-tensor.shape[0] % VOCABULARY_MULTIPLE, tensor.shape[1])]


def sglang_digest(parts: Sequence[Tensor]) -> str:
    """What SGLang's checker reports for a parameter of these parts, one after the other."""
    if not device.has_accelerator():
        digest = hashlib.sha256()
        for part in parts:
            feed(digest, part)
        return digest.hexdigest()[:16]
    # Its hash of a device tensor is a kernel of its own.
    from sglang.srt.managers.mm_utils import tensor_hash

    whole = torch.cat([part.reshape(-1).to(device.current_device()) for part in parts])
    return f"{tensor_hash(whole):016x}"
