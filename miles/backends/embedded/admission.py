"""Holds back the requests of a rollout until all are there, then lets them in in order.

With seeds this makes batches, and so every bit of the result, independent of arrival times.
"""

from dataclasses import dataclass, field

from miles.backends.embedded.protocol import Refused
from miles.backends.embedded.requests import Request


@dataclass
class _Gate:
    count: int
    deadline: float
    waiting: dict[int, Request] = field(default_factory=dict[int, Request])


class Admission:
    """Gates by key. Times are ``time.monotonic()``."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._gates: dict[str, _Gate] = {}

    def __len__(self) -> int:
        return sum(len(gate.waiting) for gate in self._gates.values())

    @property
    def deadline(self) -> float | None:
        """When the first gate gives up."""
        return min((gate.deadline for gate in self._gates.values()), default=None)

    def enter(self, request: Request, now: float) -> list[Request]:
        """Hold a request; when it completes its key, return all of them in order of position.

        Raises ``Refused`` for a position that is taken or a count that differs.
        """
        if request.admission is None:
            return [request]
        key, position, count = request.admission
        gate = self._gates.setdefault(key, _Gate(count, now + self._timeout_s))
        if gate.count != count or position in gate.waiting:
            raise Refused(
                f"admission [{key!r}, {position}, {count}]: the key has count {gate.count} and "
                f"positions {sorted(gate.waiting)}"
            )
        gate.waiting[position] = request
        if len(gate.waiting) < count:
            return []
        del self._gates[key]
        return [gate.waiting[i] for i in range(count)]

    def remove(self, requests: set[Request]) -> None:
        """Forget these requests; their key can then no longer complete, and expires."""
        for key, gate in list(self._gates.items()):
            gate.waiting = {i: r for i, r in gate.waiting.items() if r not in requests}
            if not gate.waiting:
                del self._gates[key]

    def expire(self, now: float) -> list[tuple[Request, Refused]]:
        """Give up gates whose time is over: their requests and why."""
        expired: list[tuple[Request, Refused]] = []
        for key, gate in list(self._gates.items()):
            if gate.deadline > now:
                continue
            del self._gates[key]
            missing = sorted(set(range(gate.count)) - set(gate.waiting))
            message = (
                f"admission {key!r}: {len(missing)} of {gate.count} requests did not come within "
                f"{self._timeout_s:g} s (positions {str(missing[:20])[1:-1]})"
            )
            expired.extend((request, Refused(message)) for request in gate.waiting.values())
        return expired
