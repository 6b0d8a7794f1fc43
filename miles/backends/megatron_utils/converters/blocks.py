"""The entries of what most decoder families share: embeddings, attention, MLPs, experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron_utils.converters.table import Entry, Split


@dataclass(frozen=True)
class Names:
    """Prefixes of one decoder layer on both sides."""

    megatron: str
    hf: str

    @classmethod
    def of_layer(cls, number: int, model: str = "model.") -> "Names":
        return cls(f"decoder.layers.{number}.", f"{model}layers.{number}.")


def whole(megatron: str, hf: str, split: Split = Split.REPLICATED, **more: Any) -> Entry:
    """An entry of one checkpoint tensor that Megatron holds as it is."""
    return Entry(megatron=megatron, hf=(hf,), split=split, join=_first, part=_alone, **more)


def embeddings(tied: bool, model: str = "model.") -> tuple[Entry, Entry | None]:
    """Input embedding, and the output layer unless both are one tensor."""
    name, head = f"{model}embed_tokens.weight", "lm_head.weight"
    inputs = "embedding.word_embeddings.weight"
    outputs = "output_layer.weight"
    if tied:
        return whole(inputs, name, Split.VOCAB, tied=(outputs,), aliases=(head,)), None
    return whole(inputs, name, Split.VOCAB), whole(outputs, head, Split.VOCAB)


def norms(names: Names) -> list[Entry]:
    """The two layer norms of a decoder layer."""
    return [
        whole(f"{names.megatron}input_layernorm.weight", f"{names.hf}input_layernorm.weight"),
        whole(
            f"{names.megatron}pre_mlp_layernorm.weight",
            f"{names.hf}post_attention_layernorm.weight",
        ),
    ]


def attention(
    names: Names,
    config: Any,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
    output_gate: bool = False,
) -> list[Entry]:
    """Self-attention. ``head_norms``: norms of query and key over the head dimension.

    ``output_gate``: ``q_proj`` holds ``[query, gate]`` for each head.
    """
    mine, theirs = f"{names.megatron}self_attention.", f"{names.hf}self_attn."
    num_groups = config.num_key_value_heads
    heads = Heads(config.num_attention_heads // num_groups, head_dim(config), output_gate)
    entries = [
        Entry(
            megatron=f"{mine}linear_qkv.{kind}",
            hf=tuple(f"{theirs}{x}_proj.{kind}" for x in "qkv"),
            split=Split.COLUMN,
            join=partial(join_qkv, heads=heads),
            part=partial(part_qkv, heads=heads),
            units=num_groups,
        )
        for kind in ("weight", "bias")
        if kind == "weight" or qkv_bias
    ]
    entries.append(whole(f"{mine}linear_proj.weight", f"{theirs}o_proj.weight", Split.ROW))
    if out_bias:
        entries.append(whole(f"{mine}linear_proj.bias", f"{theirs}o_proj.bias"))
    if head_norms:
        entries += [
            whole(f"{mine}{x}_layernorm.weight", f"{theirs}{x}_norm.weight") for x in ("q", "k")
        ]
    return entries


def gated_mlp(
    mine: str, theirs: str, *, bias: bool = False, expert: int | None = None
) -> list[Entry]:
    """``down(act(gate(x)) * up(x))`` under the two prefixes."""
    kinds = ("weight", "bias") if bias else ("weight",)
    entries = [
        Entry(
            megatron=f"{mine}linear_fc1.{kind}",
            hf=(f"{theirs}gate_proj.{kind}", f"{theirs}up_proj.{kind}"),
            split=Split.GATED,
            join=_stacked,
            part=_halves,
            expert=expert,
        )
        for kind in kinds
    ]
    fc2, down = f"{mine}linear_fc2.", f"{theirs}down_proj."
    entries.append(whole(f"{fc2}weight", f"{down}weight", Split.ROW, expert=expert))
    if bias:
        entries.append(whole(f"{fc2}bias", f"{down}bias", expert=expert))
    return entries


def experts(names: Names, num_experts: int) -> list[Entry]:
    """Router and routed experts, which the checkpoint holds one by one."""
    entries = [whole(f"{names.megatron}mlp.router.weight", f"{names.hf}mlp.gate.weight")]
    for number in range(num_experts):
        entries += gated_mlp(
            f"{names.megatron}mlp.experts.local_experts.{number}.",
            f"{names.hf}mlp.experts.{number}.",
            expert=number,
        )
    return entries


@dataclass(frozen=True)
class Heads:
    """The shape of one query group: so many query heads to one key and one value head."""

    num_queries: int
    dim: int
    gated: bool = False

    @property
    def rows(self) -> int:
        """Rows of ``q_proj`` for each query head."""
        return self.dim * (2 if self.gated else 1)


def head_dim(hf_config: Any) -> int:
    """Size of an attention head; older configs leave it to be derived."""
    explicit = getattr(hf_config, "head_dim", None)
    return explicit or hf_config.hidden_size // hf_config.num_attention_heads


def join_qkv(tensors: Sequence[Tensor], heads: Heads) -> Tensor:
    """``[q; k; v]`` group by group, so that a split of dimension 0 is a split by groups.

    With an output gate a group is ``[q; gate; k; v]``. Weights ``[rows, H]`` or biases ``[rows]``.
    """
    query, key, value = tensors
    tail = query.shape[1:]
    groups = key.shape[0] // heads.dim
    query = query.reshape(groups, heads.num_queries, -1, heads.dim, *tail)
    # [group, head, query or gate, ...] -> all queries of the group, then all its gates.
    query = query.transpose(1, 2).reshape(groups, -1, *tail)
    key = key.reshape(groups, heads.dim, *tail)
    value = value.reshape(groups, heads.dim, *tail)
    return torch.cat([query, key, value], 1).reshape(-1, *tail)


def part_qkv(tensor: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """The inverse of ``join_qkv``."""
    tail = tensor.shape[1:]
    query_rows = heads.num_queries * heads.rows
    grouped = tensor.reshape(-1, query_rows + 2 * heads.dim, *tail)
    query, key, value = grouped.split([query_rows, heads.dim, heads.dim], 1)
    query = query.reshape(len(grouped), -1, heads.num_queries, heads.dim, *tail).transpose(1, 2)
    return (
        query.reshape(-1, *tail),
        key.reshape(-1, *tail),
        value.reshape(-1, *tail),
    )


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _alone(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def _halves(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.chunk(2)
