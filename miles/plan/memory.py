"""Bytes by where they lie, and the lines of which a forecast is made."""

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Of one rank."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            device=self.device + other.device,
            host=self.host + other.host,
            disk=self.disk + other.disk,
        )


@dataclass(frozen=True, kw_only=True)
class Line:
    """One component of a rank's memory."""

    component: str
    bytes: Bytes


def line(component: str, *, device: float = 0, host: float = 0, disk: float = 0) -> Line:
    """In whole bytes, rounded down."""
    return Line(
        component=component, bytes=Bytes(device=int(device), host=int(host), disk=int(disk))
    )


def total(lines: Iterable[Line]) -> Bytes:
    return sum((entry.bytes for entry in lines), Bytes())
