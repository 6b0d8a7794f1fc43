"""A forecast as tables for people, and as plain values for machines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from miles.plan.forecast import Phase
from miles.plan.job import Job
from miles.plan.memory import GIB
from miles.plan.remedies import Remedy


def as_values(job: Job, phases: Sequence[Phase], found: Sequence[Remedy]) -> dict[str, Any]:
    """Bytes throughout; host bytes of a line are of one rank."""
    return {
        "fits": all(phase.fits for phase in phases),
        "device_bytes": job.device_bytes,
        "host_bytes": job.host_bytes,
        "parameters": job.model.num_parameters,
        "phases": [_values(phase) for phase in phases],
        "remedies": [vars(remedy) for remedy in found],
        "notes": list(job.notes),
    }


def show(console: Console, job: Job, phases: Sequence[Phase], found: Sequence[Remedy]) -> None:
    layout, batch = job.layout, job.batch
    console.print(
        f"{job.model.num_parameters:,} parameters, {layout.backend} on {layout.ranks} ranks, "
        f"micro-batches of up to {batch.tokens:,} tokens a rank, samples of up to "
        f"{batch.longest:,}"
    )
    for group in _alike(phases):
        console.print(_table(group))
    if found:
        console.print("What to turn, the cheapest first:")
    for remedy in found:
        console.print(_remedy(remedy), soft_wrap=True, highlight=False)
    if not found and not all(phase.fits for phase in phases):
        console.print("No flag that this forecast knows makes it fit.")
    for note in job.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _values(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "place": phase.place,
        "moment": phase.moment,
        "lines": [{"component": entry.component, **vars(entry.bytes)} for entry in phase.lines],
        "sum": vars(phase.sum),
        "fits": phase.fits,
        "excess_device": phase.excess_device,
        "excess_host": phase.excess_host,
        "too_short": phase.too_short,
    }


def _alike(phases: Sequence[Phase]) -> list[Phase]:
    """Stages of a pipeline with equal contents as one."""
    found: dict[tuple[object, ...], list[Phase]] = {}
    for phase in phases:
        found.setdefault((phase.name, phase.moment, phase.lines), []).append(phase)
    return [
        replace(group[0], place=", ".join(phase.place for phase in group))
        for group in found.values()
    ]


def _table(phase: Phase) -> RenderableType:
    moment = f", fullest in the {phase.moment}" if phase.moment else ""
    table = Table(show_footer=True)
    total = phase.sum
    table.add_column("GiB", footer="sum")
    for name, value in (("device", total.device), ("host", total.host), ("disk", total.disk)):
        table.add_column(name, justify="right", footer=_gib(value))
    for entry in phase.lines:
        held = entry.bytes
        table.add_row(entry.component, _gib(held.device), _gib(held.host), _gib(held.disk))
    title = Text(f"{phase.name}: {phase.place}{moment}", style="bold")
    return Group(title, table, Text(_verdict(phase), style="green" if phase.fits else "bold red"))


def _verdict(phase: Phase) -> str:
    parts = [f"device: {_fit(phase.sum.device, phase.device_bytes)}"]
    if phase.host_bytes is not None and phase.sum.host:
        host = phase.sum.host * phase.processes
        count = f"{phase.processes} rank{'s' if phase.processes > 1 else ''}"
        parts.append(f"host of {count}: {_fit(host, phase.host_bytes)}")
    if phase.too_short:
        parts.append(f"does not work: {phase.too_short}")
    return "; ".join(parts)


def _fit(held: int, capacity: int) -> str:
    of = f"{held / GIB:.1f} of {capacity / GIB:.1f} GiB"
    if held <= capacity:
        return f"{of}, fits"
    return f"{of}, does not fit: {(held - capacity) / GIB:.1f} GiB too much"


def _remedy(remedy: Remedy) -> str:
    saved = [
        f"{num_bytes / GIB:.1f} GiB {where}"
        for num_bytes, where in ((remedy.device, "of the device"), (remedy.host, "of the host"))
        if num_bytes > 0
    ]
    effect = f"saves {' and '.join(saved)}" if saved else "makes room"
    enough = "enough alone" if remedy.enough else "not enough alone"
    return f"  {remedy.flag}: {effect}, {enough}; costs {remedy.cost}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else ""
