"""SGLang's fused parameters: which checkpoint tensors make up each, and digests of them.

SGLang's weight checker hashes parameters of the engine. Those are tensors of the checkpoint, one
after the other in memory: queries, keys and values; gate and up; all experts of a layer. Rows of
the vocabulary are padded with zeros. In an engine of several tensor-parallel ranks each holds a
part of most of them.
"""

# pyright: reportMissingImports=false
# sglang is not among the dependencies: its list of them is for CUDA alone.

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.contracts.engine import on_rank
from miles.core import device, hf
from miles.weight_sync.checksums import feed

VOCABULARY_MULTIPLE = 64

_ATTENTION = re.compile(r"(.+\.self_attn\.)([qkv])_proj\.(\w+)")
_MLP = re.compile(r"(.+\.mlp\.)(gate|up)_proj\.(\w+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_BY_COLUMNS = re.compile(r".+\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
_VOCABULARY = re.compile(r"model\.embed_tokens\.weight|lm_head\.weight")

Split = Callable[[Tensor, int, int], Tensor]
"""The part of a checkpoint's tensor that a rank holds, of so many ranks."""


def whole(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor


def rows(tensor: Tensor, rank: int, size: int) -> Tensor:
    share = tensor.shape[0] // size
    return tensor[rank * share : (rank + 1) * share]


def columns(tensor: Tensor, rank: int, size: int) -> Tensor:
    share = tensor.shape[1] // size
    return tensor[:, rank * share : (rank + 1) * share]


def vocabulary(tensor: Tensor, rank: int, size: int) -> Tensor:
    padding = tensor.new_zeros(-tensor.shape[0] % VOCABULARY_MULTIPLE, tensor.shape[1])
    return rows(torch.cat([tensor, padding]), rank, size)


def heads(tensor: Tensor, rank: int, size: int, *, num_heads: int) -> Tensor:
    """Rows of keys or values; of fewer heads than ranks, neighbours hold the same one."""
    if num_heads >= size:
        return rows(tensor, rank, size)
    return rows(tensor, rank * num_heads // size, num_heads)


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint lies in the engine."""

    parameter: str
    part: int = 0
    num_parts: int = 1
    split: Split = field(default=whole, compare=False)
    """Which part a rank of the engine holds."""


Table = Callable[[str], Place]
"""Name in the checkpoint -> place."""


def dense_place(name: str, *, num_kv_heads: int) -> Place:
    if found := _ATTENTION.fullmatch(name):
        split = rows if found[2] == "q" else partial(heads, num_heads=num_kv_heads)
        return Place(f"{found[1]}qkv_proj.{found[3]}", "qkv".index(found[2]), 3, split)
    if found := _MLP.fullmatch(name):
        return Place(f"{found[1]}gate_up_proj.{found[3]}", int(found[2] == "up"), 2, rows)
    if _BY_COLUMNS.fullmatch(name):
        return Place(name, split=columns)
    return Place(name, split=vocabulary if _VOCABULARY.fullmatch(name) else whole)


def moe_place(name: str, *, num_kv_heads: int, num_experts: int) -> Place:
    found = _EXPERT.fullmatch(name)
    if found is None:
        return dense_place(name, num_kv_heads=num_kv_heads)
    expert = int(found[2])
    if found[3] == "down":
        return Place(f"{found[1]}.w2_weight", expert, num_experts, columns)
    part = 2 * expert + (found[3] == "up")
    return Place(f"{found[1]}.w13_weight", part, 2 * num_experts, rows)


def _dense_table(config: Any) -> Table:
    return partial(dense_place, num_kv_heads=config.num_key_value_heads)


def _moe_table(config: Any) -> Table:
    return partial(
        moe_place, num_kv_heads=config.num_key_value_heads, num_experts=config.num_experts
    )


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

    ``dtype`` is the engine's: it casts what it loads. ``num_ranks`` are its tensor-parallel ranks;
    of several, each has digests of its own (``on_rank``). Parts wait as copies until their
    parameter is whole.
    """

    def __init__(self, table: Table, dtype: torch.dtype, num_ranks: int = 1) -> None:
        self._table = table
        self._dtype = dtype
        self._num_ranks = num_ranks
        self._waiting: dict[str, dict[int, Tensor]] = {}
        self._expected: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        place = self._table(name)
        loaded = tensor.detach().to(self._dtype, copy=place.num_parts > 1)
        for rank in range(self._num_ranks):
            part = place.split(loaded, rank, self._num_ranks)
            self._add(on_rank(place.parameter, rank, self._num_ranks), place, part)

    def result(self) -> Mapping[str, str]:
        """A parameter that is not whole has, instead of a digest, what is missing."""
        unfinished = {
            name: f"sent {len(parts)} of {self._expected[name]} parts"
            for name, parts in self._waiting.items()
        }
        return self._digests | unfinished

    def _add(self, name: str, place: Place, part: Tensor) -> None:
        if place.num_parts == 1:
            self._digests[name] = sglang_digest([part])
            return
        parts = self._waiting.setdefault(name, {})
        parts[place.part] = part
        self._expected[name] = place.num_parts
        if len(parts) == place.num_parts:
            del self._waiting[name]
            self._digests[name] = sglang_digest([parts[i] for i in sorted(parts)])


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
