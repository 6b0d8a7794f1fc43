"""The core attention on one or two context-parallel ranks."""

import dataclasses
import os
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.backends.megatron_utils.layer_jobs import make_config, parallel

BOUNDS = (0, 4, 16, 24)
NUM_ROWS = 3
WINDOW = 3
SCALE = 0.3


class Case(NamedTuple):
    packed: bool
    windowed: bool


def tensors(case: Case) -> tuple[Tensor, ...]:
    """Query, key, value of all tokens, and what the loss multiplies the output with."""
    generator = torch.Generator().manual_seed(4)
    rows = () if case.packed else (NUM_ROWS,)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BOUNDS[-1], *rows, *shape, generator=generator)

    return draw(4, 8), draw(2, 8), draw(2, 8), draw(32)


def packed_params(bounds: Tensor) -> Any:
    """Of a row whose documents end at ``bounds``."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def run_attention(case: Case) -> dict[str, Any]:
    """Output and gradients at this rank's tokens."""
    cp_size = int(os.environ["WORLD_SIZE"])
    with parallel(context_parallel_size=cp_size):
        return _run(case, cp_size)


def _run(case: Case, cp_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    from miles.backends.megatron_utils.attention import CoreAttention, zigzag_indices

    config = make_config(
        context_parallel_size=cp_size, window_size=(WINDOW - 1, 0) if case.windowed else None
    )
    attention = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    bounds = torch.tensor(BOUNDS if case.packed else (0, BOUNDS[-1]), dtype=torch.int32)
    positions = zigzag_indices(bounds, cp_size, parallel_state.get_context_parallel_rank())
    *inputs, weights = (tensor[positions] for tensor in tensors(case))
    for tensor in inputs:
        tensor.requires_grad_()
    packed = packed_params(bounds) if case.packed else None
    output = attention(*inputs, None, packed_seq_params=packed)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return {
        "output": output.detach(),
        "positions": positions,
        **dict(zip("qkv", gradients, strict=True)),
    }


class _Counter(TorchDispatchMode):
    """Operations that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def run_packed_documents(num_documents: int, length: int) -> dict[str, Any]:
    """Self-attention over one packed row, and over each document alone."""
    with parallel():
        return _packed_documents(num_documents, length)


def _packed_documents(num_documents: int, length: int) -> dict[str, Any]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.spec_utils import build_module, get_submodules

    from miles.backends.megatron_utils.specs import block_spec

    config = make_config()
    (layer, _) = block_spec(config).layer_specs or []
    parts: Any = get_submodules(layer)
    spec = parts.self_attention
    attention = build_module(spec, config=config, layer_number=1)
    total = num_documents * length
    generator = torch.Generator().manual_seed(num_documents)
    hidden = torch.randn(total, 1, config.hidden_size, generator=generator)
    rotary = RotaryEmbedding(
        kv_channels=config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True
    )
    bounds = torch.arange(num_documents + 1, dtype=torch.int32) * length
    packed = packed_params(bounds)

    def attend(tokens: Tensor, packed: Any) -> Tensor:
        frequencies = rotary(length, packed_seq=packed is not None)
        output, _ = attention(tokens, None, rotary_pos_emb=frequencies, packed_seq_params=packed)
        return output

    with torch.no_grad():
        attend(hidden, packed)  # The layout of the row is computed once, for all layers.
        with _Counter() as counter:
            output = attend(hidden, packed)
        alone = torch.cat([attend(document, None) for document in hidden.split(length)])
    return {"packed": output, "alone": alone, "operations": counter.count}


class Rotary(NamedTuple):
    interleaved: bool
    share: float


def run_beside_megatron(rotary: Rotary) -> dict[str, Any]:
    """Self-attention over a packed row of documents of several lengths, ours and Megatron's own
    with the same weights: outputs and gradients of the input."""
    cp_size = int(os.environ["WORLD_SIZE"])
    with parallel(context_parallel_size=cp_size):
        return _beside_megatron(rotary, cp_size)


def _beside_megatron(rotary: Rotary, cp_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.spec_utils import build_module, get_submodules

    from miles.backends.megatron_utils.attention import zigzag_indices
    from miles.backends.megatron_utils.specs import block_spec

    groups: Any = parallel_state
    config = make_config(context_parallel_size=cp_size, rotary_interleaved=rotary.interleaved)
    (layer, _) = block_spec(config).layer_specs or []
    parts: Any = get_submodules(layer)
    spec = parts.self_attention
    ours: Any = build_module(spec, config=config, layer_number=1)
    spec = dataclasses.replace(spec, module=SelfAttention)
    megatrons: Any = build_module(spec, config=config, layer_number=1)
    megatrons.load_state_dict(ours.state_dict())
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    longest = int(bounds.diff().max())
    # Without the padding at their ends the documents are shorter.
    shorter = bounds - torch.arange(len(bounds), dtype=torch.int32)
    packed = dataclasses.replace(
        packed_params(bounds),
        cu_seqlens_q=shorter,
        cu_seqlens_kv=shorter,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
    )
    embedding = RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=rotary.share,
        rotary_interleaved=rotary.interleaved,
        use_cpu_initialization=True,
        cp_group=groups.get_context_parallel_group(),
    )
    frequencies = embedding(longest, packed_seq=True)
    hidden, weights = torch.randn(
        2, BOUNDS[-1], 1, config.hidden_size, generator=torch.Generator().manual_seed(6)
    )
    positions = zigzag_indices(bounds, cp_size, parallel_state.get_context_parallel_rank())
    answers: dict[str, Any] = {}
    for name, attention in (("ours", ours), ("megatrons", megatrons)):
        tokens = hidden[positions].requires_grad_()
        output, _ = attention(tokens, None, rotary_pos_emb=frequencies, packed_seq_params=packed)
        (gradient,) = torch.autograd.grad((output * weights[positions]).sum(), tokens)
        answers[name] = (output.detach(), gradient)
    return answers


def run_with_another_core(num_documents: int, length: int) -> list[Any]:
    """What a core attention that is not ours is given of a packed row: shape and format."""
    with parallel():
        return _with_another_core(num_documents, length)


def _with_another_core(num_documents: int, length: int) -> list[Any]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.spec_utils import build_module, get_submodules

    from miles.backends.megatron_utils.specs import block_spec

    seen: list[Any] = []

    class Core(torch.nn.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()

        def forward(
            self, query: Tensor, *others: Any, packed_seq_params: Any, **how: Any
        ) -> Tensor:
            seen.extend([list(query.shape), packed_seq_params.qkv_format])
            return query.flatten(1)

    config = make_config()
    (layer, _) = block_spec(config).layer_specs or []
    parts: Any = get_submodules(layer)
    spec = parts.self_attention
    modules = dataclasses.replace(spec.submodules, core_attention=Core)
    spec = dataclasses.replace(spec, submodules=modules)
    attention = build_module(spec, config=config, layer_number=1)
    rotary = RotaryEmbedding(
        kv_channels=config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True
    )
    bounds = torch.arange(num_documents + 1, dtype=torch.int32) * length
    packed = packed_params(bounds)
    attention(
        torch.zeros(num_documents * length, 1, config.hidden_size),
        None,
        rotary_pos_emb=rotary(length, packed_seq=True),
        packed_seq_params=packed,
    )
    return seen


def keeps_layouts_of_rows() -> bool:
    """Whether anything holds the layouts of a packed row once a trainer's caches are dropped."""
    with parallel():
        from miles.backends.megatron_utils import attention
        from miles.backends.megatron_utils.caches import drop_caches

        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        made = (
            attention.rank_positions(bounds, 1, 0),
            attention.rank_layout(bounds, 2, 0).key_index,
        )
        held = [weakref.ref(tensor) for tensor in (bounds, *made)]
        del bounds, made
        assert all(reference() is not None for reference in held)
        drop_caches()
        return any(reference() is not None for reference in held)
