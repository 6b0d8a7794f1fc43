"""What a parameter costs a trainer's rank, and where that lies: pure arithmetic.

Three places: the device, pinned memory of the host, files. A trainer that sleeps has copied its
state away; parts of it may always be elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

from miles.plan.memory import Line, line

CHUNKS_IN_FLIGHT = 2
"""Of the state that goes to disk or comes from there: one moves while the next is filled."""
STAGED_BUCKETS = 3
"""Of a streamed state, in pinned memory that is kept: one is read, one moves, one is written."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where a trainer's state lies, by the flags."""

    sleeps: bool = False
    """--offload-train: the state leaves the device between the phases of training."""
    target: Literal["cpu", "disk"] = "cpu"
    """--offload-train-target: where it goes."""
    chunk_bytes: int = 256 * 2**20
    """--offload-train-disk-chunk-mb: pieces in which it goes to disk."""
    streams: bool = False
    """--stream-optimizer-state-to-disk: masters and moments are files always."""
    streamed_moment_bytes: int = 8
    """--stream-optimizer-state-moment-dtype: 8 in fp32, 4 in bf16."""
    rematerializes: bool = False
    """--rematerialize-param-from-master-weight: sleeping parameters are rounded masters again."""
    on_host: bool = False
    """--fsdp-cpu-offload: what is sharded is on the host always."""
    optimizer_on_host: float = 0.0
    """--optimizer-cpu-offload: this share of masters and moments is on the host always."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """How many parameters of each kind a rank holds, bytes of each, and where they lie."""

    parameters: int
    """Elements that are the rank's own: FSDP's shards; Megatron's whole share of the model."""
    optimized: int
    """Elements whose masters and moments are here: fewer under a distributed optimizer."""
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int = 0
    """0 where the parameter is its own master."""
    moment_bytes: int = 8
    """Of both together."""
    reference_bytes: int = 0
    """Of a parameter of the frozen reference; 0 without one."""
    pinned: float = 1.0
    """Bytes that a pinned one takes: FSDP2 pins parameters and gradients tensor by tensor."""
    offload: Offload = Offload()

    def awake(self) -> list[Line]:
        """While training; the copies of the last sleep are kept, since pinning is slow."""
        parts = [("parameters", self._parameters), ("reference", self._reference)]
        lines = [self._pinned(name, count) for name, count in parts]
        lines += self._optimizer()
        backup = self._backup()
        if self.offload.sleeps and not self.offload.on_host:
            lines.append(self._away("copies for sleep", backup))
        return _present(lines)

    def asleep(self, *, in_sync: bool = False) -> list[Line]:
        """Between the phases of training. ``in_sync``: during a weight update, for which the
        parameters stay."""
        if not self.offload.sleeps or self.offload.on_host:
            return self.awake()
        lines = [self._away("sleeping trainer", self._backup())]
        held = round(self.offload.optimizer_on_host * self._state)
        lines.append(line("optimizer on the host", host=held))
        if in_sync:
            lines.append(self._held("parameters", self._parameters))
        if self.offload.streams:
            lines += self._optimizer()
        return _present(lines)

    def gradients(self) -> list[Line]:
        return [self._pinned("gradients", self.gradient_bytes * self.parameters)]

    def buckets(self) -> list[Line]:
        """What a streamed optimizer step holds of its files at a time."""
        if not self.offload.streams:
            return []
        return [line("optimizer buckets", device=CHUNKS_IN_FLIGHT * self.offload.chunk_bytes)]

    def checkpoint_bytes(
        self, *, optimizer: bool, copies: tuple[int, int] = (1, 1), state_bytes: int | None = None
    ) -> int:
        """This rank's part of a checkpoint, to which ranks with the same contents contribute
        alike: so many hold the same parameters, and the same masters and moments. ``state_bytes``:
        of the latter for each parameter, where they are not written as they are held."""
        parameters = self._parameters // copies[0]
        if not optimizer:
            return parameters
        each = self.master_bytes + self.moment_bytes if state_bytes is None else state_bytes
        return parameters + each * self.optimized // copies[1]

    @property
    def _parameters(self) -> int:
        return self.parameter_bytes * self.parameters

    @property
    def _state(self) -> int:
        return (self.master_bytes + self.moment_bytes) * self.optimized

    @property
    def _reference(self) -> int:
        return self.reference_bytes * self.parameters

    @property
    def _has_no_copy(self) -> bool:
        return self.offload.rematerializes and self.master_bytes > 0

    def _optimizer(self) -> list[Line]:
        masters = self.master_bytes * self.optimized
        if self.offload.streams:
            moments = self.offload.streamed_moment_bytes * self.optimized
            return [
                line("masters", disk=masters),
                line("moments", disk=moments),
                line("staged buckets", host=STAGED_BUCKETS * self.offload.chunk_bytes),
            ]
        moments = self.moment_bytes * self.optimized
        away, share = self.offload.optimizer_on_host, 1 - self.offload.optimizer_on_host
        return [
            self._held("masters", round(share * masters)),
            self._held("moments", round(share * moments)),
            line("optimizer on the host", host=round(away * (masters + moments))),
        ]

    def _backup(self) -> int:
        optimizer = (
            0 if self.offload.streams else round((1 - self.offload.optimizer_on_host) * self._state)
        )
        parameters = 0 if self._has_no_copy else self._parameters
        return parameters + optimizer + self._reference

    def _held(self, name: str, num_bytes: int) -> Line:
        return line(name, host=num_bytes) if self.offload.on_host else line(name, device=num_bytes)

    def _pinned(self, name: str, num_bytes: int) -> Line:
        return self._held(name, round(self.pinned * num_bytes))

    def _away(self, name: str, num_bytes: int) -> Line:
        if self.offload.target == "disk":
            return line(name, host=CHUNKS_IN_FLIGHT * self.offload.chunk_bytes, disk=num_bytes)
        return line(name, host=num_bytes)


def _present(lines: list[Line]) -> list[Line]:
    return [entry for entry in lines if entry.bytes.device or entry.bytes.host or entry.bytes.disk]
