"""The layouts of ranks that are tested; the table of docs/training-backend.md is made from them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

RECOMPUTE = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes: what is not given is 1."""

    model: Literal["dense", "tied", "moe", "qwen3_5"] = "dense"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    packed: bool = True
    flags: tuple[str, ...] = ()
    quick: bool = False
    """Whether ``make test`` runs it; ``make test-full`` runs all."""
    note: str = field(default="", compare=False)
    """What the flags are, in the table."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def argv(self) -> tuple[str, ...]:
        """Megatron's flags."""
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "--expert-model-parallel-size": self.ep,
            "--expert-tensor-parallel-size": self.etp,
        }
        argv = [text for flag, size in sizes.items() for text in (flag, str(size))]
        if self.vpp > 1:
            argv += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.sequence_parallel:
            argv.append("--sequence-parallel")
        return (*argv, *self.flags)

    @property
    def groups(self) -> dict[str, Any]:
        """Fields of our own configuration."""
        data: dict[str, Any] = {}
        if not self.packed:
            data = {"use_dynamic_batch_size": False, "micro_batch_size": 2}
        return {"cluster": {"context_parallel_size": self.cp}, "data": data}

    def __str__(self) -> str:
        axes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        sizes = [f"{axis}{getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        extra = ["sp"] * self.sequence_parallel + ["padded"] * (not self.packed)
        extra += [self.note.replace(" ", "-")] if self.note else []
        return "-".join([self.model, *(sizes or ["one"]), *extra])


LAYOUTS = (
    Layout(quick=True),
    Layout(packed=False),
    Layout(tp=2, quick=True),
    Layout(tp=2, sequence_parallel=True, quick=True),
    Layout(model="tied", tp=2, sequence_parallel=True, packed=False),
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2),
    Layout(model="tied", pp=2, quick=True),
    Layout(pp=4),
    Layout(pp=2, vpp=2, quick=True),
    Layout(model="tied", pp=2, vpp=2, packed=False),
    Layout(dp=2, flags=OVERLAP, note="overlapped communication", quick=True),
    Layout(dp=4),
    Layout(dp=8),
    Layout(cp=2, quick=True),
    Layout(cp=2, packed=False, quick=True),
    Layout(cp=4),
    Layout(tp=2, pp=2, sequence_parallel=True, flags=RECOMPUTE, note="recompute", quick=True),
    Layout(tp=2, cp=2, sequence_parallel=True, quick=True),
    Layout(tp=2, cp=2, sequence_parallel=True, packed=False),
    Layout(tp=2, dp=2, sequence_parallel=True, flags=OVERLAP, note="overlapped communication"),
    Layout(pp=2, dp=2),
    Layout(pp=2, cp=2),
    Layout(pp=2, vpp=2, cp=2),
    Layout(cp=2, dp=2),
    Layout(pp=2, vpp=2, dp=2, flags=OVERLAP, note="overlapped communication"),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, cp=2, sequence_parallel=True),
    Layout(tp=2, cp=2, dp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True),
    Layout(model="moe"),
    Layout(model="moe", ep=2, dp=2, quick=True),
    Layout(model="moe", ep=2, dp=2, packed=False),
    Layout(model="moe", ep=4, dp=4),
    Layout(model="moe", tp=2, etp=2, sequence_parallel=True, quick=True),
    Layout(model="moe", tp=2, ep=2, sequence_parallel=True, quick=True),
    Layout(
        model="moe",
        tp=2,
        ep=2,
        sequence_parallel=True,
        flags=("--moe-token-dispatcher-type", "allgather"),
        note="allgather dispatcher",
    ),
    Layout(model="moe", pp=2, ep=2, dp=2, quick=True),
    Layout(model="moe", pp=2, vpp=2),
    Layout(model="moe", pp=2, vpp=2, ep=2, dp=2),
    Layout(model="moe", cp=2, ep=2),
    Layout(model="moe", tp=2, cp=2, ep=2, sequence_parallel=True),
    Layout(model="moe", tp=2, ep=2, etp=2, dp=2, sequence_parallel=True),
    Layout(
        model="moe", tp=2, pp=2, ep=2, sequence_parallel=True, flags=RECOMPUTE, note="recompute"
    ),
    Layout(model="moe", tp=2, pp=2, ep=4, dp=2, sequence_parallel=True),
    Layout(model="moe", tp=2, pp=2, cp=2, ep=2, etp=2, sequence_parallel=True),
    Layout(model="qwen3_5"),
    Layout(model="qwen3_5", packed=False),
    Layout(model="qwen3_5", tp=2),
    Layout(model="qwen3_5", tp=2, sequence_parallel=True, packed=False),
    Layout(model="qwen3_5", pp=2),
    Layout(model="qwen3_5", pp=2, vpp=2),
    Layout(model="qwen3_5", cp=2),
    Layout(model="qwen3_5", cp=2, packed=False),
    Layout(model="qwen3_5", dp=2, flags=OVERLAP, note="overlapped communication"),
    Layout(model="qwen3_5", tp=2, cp=2, sequence_parallel=True, quick=True),
    Layout(model="qwen3_5", tp=2, pp=2, sequence_parallel=True, flags=RECOMPUTE, note="recompute"),
)
_NAMES = {
    "dense": "Qwen3",
    "tied": "Qwen3, tied embeddings",
    "moe": "Qwen3-MoE",
    "qwen3_5": "Qwen3.5",
}


def params(layouts: Iterable[Layout]) -> list[Any]:
    """For ``parametrize``: those that are not quick run in ``make test-full`` alone."""
    return [
        pytest.param(layout, marks=() if layout.quick else (pytest.mark.full,), id=str(layout))
        for layout in layouts
    ]


def table() -> str:
    """Markdown: one row a layout, those of one process left out."""
    lines = [
        "| model | TP | PP | VPP | CP | EP | ETP | DP | SP | rows | with |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        if layout.num_ranks == 1:
            continue
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, layout.dp)
        cells = [_NAMES[layout.model], *map(str, sizes), "yes" if layout.sequence_parallel else ""]
        cells += ["packed" if layout.packed else "padded", layout.note]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)
