"""One weight update: pause, flush, begin, stream buckets, end, check, resume. The only copy.

A failed update leaves the engines paused and the version as it was: resuming would generate from
half-old, half-new weights. The next push, or an engine restart, heals it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch

from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError, EngineFeatures, EngineSet, PauseMode
from miles.contracts.transport import WeightTransport
from miles.contracts.types import NamedTensor
from miles.core import device, distributed, hf
from miles.core.distributed import error_of
from miles.core.registry import Registry
from miles.core.timer import Timer
from miles.weight_sync.buckets import bucketize
from miles.weight_sync.checksums import Digests, TensorDigests, compare
from miles.weight_sync.fused import FusedDigests, Table, fuse_table

COLOCATED, DEVICE_IPC = "colocated", "device_ipc"
"""Chosen by layout, device and engine, never by flag."""

TRANSPORTS: Registry[Callable[..., WeightTransport]] = Registry(
    "weight transport",
    {
        COLOCATED: "miles.weight_sync.colocated:ColocatedTransport",
        DEVICE_IPC: "miles.weight_sync.device_ipc:DeviceIpcTransport",
        "broadcast": "miles.weight_sync.broadcast:BroadcastTransport",
    },
)

ChooseTransport = Callable[[EngineFeatures], WeightTransport]

# Differing tensors that an error message names.
MAX_NAMED_DIFFERENCES = 5


class WeightMismatchError(EngineError):
    """After an update an engine holds other bytes than the trainer sent."""


class WeightSync:
    """Pushes the trainer's weights into the engines; every rank holds one and calls ``push``.

    ``choose`` picks how weights travel to engines of such features. ``check`` compares the checksum
    of every tensor after every update; ``fused`` says how engines fuse this model's, for those that
    do.
    """

    def __init__(
        self,
        choose: ChooseTransport,
        *,
        max_bytes: int,
        pause_mode: PauseMode = "retract",
        check: bool = False,
        fused: Table | None = None,
    ) -> None:
        self._choose = choose
        self._transport: WeightTransport | None = None
        self._max_bytes = max_bytes
        self._pause_mode: PauseMode = pause_mode
        self._check = check
        self._connected_to: tuple[tuple[str, ...], int] | None = None
        self._timer = Timer()
        self._fused = fused
        self._digests: Digests | None = None
        self._digest_error: Exception | None = None
        self.version = 0
        """Of the last update that succeeded; settable when a run resumes."""
        self.last_timings: dict[str, float] = {}
        """Seconds of the last push on this rank by phase: ``pause connect gather digest send load
        end check resume``. ``digest`` and ``check`` are what ``check`` costs."""

    def push(self, engines: EngineSet, weights: Iterable[NamedTensor]) -> int:
        """Load ``weights`` into the engines and return the version that they have then: the next
        one, or that of the last update where these are ``newcomers``.

        Collective: ``weights`` yields the same names on every rank, and gathers as it is read. An
        error on any rank (``EngineError`` for an engine's) is raised on all of them.
        """
        version = self.version + (engines.newcomers is None)
        self._digests, self._digest_error = None, None
        try:
            self._together("pause", lambda: self._open(engines), on=self._is_main)
            self._together("connect", lambda: self._connect(engines), on=True)
            self._stream(engines, weights, version)
            self._together("end", lambda: engines.end_weight_update(version), on=self._is_main)
            if self._check:
                self._compare(engines)
            self._together("resume", lambda: self._resume(engines), on=self._is_main)
        except BaseException:
            self.close()
            raise
        finally:
            self.last_timings = self._timer.take()
        self.version = version
        return version

    def close(self) -> None:
        """Release what the transport holds; the next push connects anew."""
        self._connected_to = None
        if self._transport is not None:
            self._transport.close()

    @property
    def _is_main(self) -> bool:
        return distributed.rank() == 0

    def _together(self, phase: str, step: Callable[[], None], *, on: bool) -> None:
        """Run the step where ``on`` holds; all ranks wait for it and fail together."""
        error: Exception | None = None
        if on:
            with self._timer.span(phase):
                error = error_of(step)
        distributed.raise_together(error, f"weight update ({phase})")

    def _open(self, engines: EngineSet) -> None:
        engines.pause(self._pause_mode)
        # Requests paused in place keep their keys and values: that is what the mode means. Without
        # any, those of finished ones go in this mode too: prompts to come would start from them.
        engines.flush_cache(unless_busy=self._pause_mode == "in_place")
        engines.begin_weight_update()

    def _connect(self, engines: EngineSet) -> None:
        wanted = (engines.urls, engines.generation)
        if self._connected_to != wanted:
            self.close()
            self._transport = self._choose(engines.features())
            if self._transport.is_source:
                self._transport.connect(engines)
            self._connected_to = wanted
        if self._check and self._is_main:
            self._digests = self._new_digests(engines.features(), engines.gpus_per_engine)

    def _new_digests(self, features: EngineFeatures, num_ranks: int) -> Digests:
        if features.checksums == "tensors":
            return TensorDigests()
        if self._fused is None:
            raise EngineError(
                "the engines' checksums are of fused parameters, and there is no table of them for "
                "this model: leave out --check-weight-update-equal"
            )
        return FusedDigests(self._fused, getattr(torch, features.dtype), num_ranks)

    def _stream(self, engines: EngineSet, weights: Iterable[NamedTensor], version: int) -> None:
        """Send every bucket. After a failure the weights are still read to the end: other ranks
        gather them with us."""
        error: Exception | None = None
        gathered, transport = iter(weights), self._transport
        assert transport is not None, "stream before connect"
        stream = self._read(gathered)
        if transport.is_source:
            error = error_of(lambda: self._send(transport, engines, stream, version))
        # An error may have ended ``stream``, not what it reads.
        drained = error_of(lambda: _drain(chain(stream, gathered)))
        error = self._digest_error or error or drained
        distributed.raise_together(error, "weight update (send)")

    def _send(
        self,
        transport: WeightTransport,
        engines: EngineSet,
        stream: Iterator[NamedTensor],
        version: int,
    ) -> None:
        for bucket in bucketize(stream, self._max_bytes):
            with self._timer.span("send"):
                transport.send(bucket, engines, version)
            # Not held while the next is gathered, nor while the engines load the last.
            del bucket
        with self._timer.span("load"):
            transport.finish()

    def _read(self, gathered: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        while True:
            with self._timer.span("gather"):
                weight = next(gathered, None)
            if weight is None:
                return
            if self._digests is not None:
                self._digest(self._digests, weight)
            yield weight

    def _digest(self, digests: Digests, weight: NamedTensor) -> None:
        """A failure waits until everything is sent: ranks that send do so in step."""
        with self._timer.span("digest"):
            self._digest_error = error_of(lambda: digests.add(weight.name, weight.tensor))
        if self._digest_error is not None:
            self._digests = None

    def _compare(self, engines: EngineSet) -> None:
        """Compare what was read from the trainer with what each engine holds."""

        def check() -> None:
            assert self._digests is not None
            sent = self._digests.result()
            for url, held in zip(engines.urls, engines.weight_checksums(), strict=True):
                differences = compare(sent, held)
                if differences:
                    shown = "; ".join(differences[:MAX_NAMED_DIFFERENCES])
                    raise WeightMismatchError(
                        f"{url}: {len(differences)} of {len(sent)} weights differ from the "
                        f"trainer's after the update: {shown}"
                    )

        self._together("check", check, on=self._is_main)

    def _resume(self, engines: EngineSet) -> None:
        try:
            engines.resume()
        except EngineError as error:
            # Some may run by now under a version that is not going to count.
            paused = error_of(lambda: engines.pause(self._pause_mode))
            raise EngineError(f"{error}" + (f"; then {paused}" if paused else "")) from error


def make_weight_sync(config: MilesConfig) -> WeightSync:
    """The session that the flags ask for."""
    settings = config.weight_sync
    check = settings.check_weight_update_equal

    def choose(features: EngineFeatures) -> WeightTransport:
        name = transport_name(config, features)
        return TRANSPORTS.load(name)(timeout_s=settings.update_weight_timeout_s)

    return WeightSync(
        choose,
        max_bytes=settings.update_weight_buffer_size,
        pause_mode=config.rollout.pause_generation_mode,
        check=check,
        fused=fuse_table(hf.load_config(str(config.rollout.hf_checkpoint))) if check else None,
    )


def transport_name(config: MilesConfig, features: EngineFeatures) -> str:
    """The layout picks it, and between processes that share a device what both can do."""
    if not config.cluster.colocate:
        return config.weight_sync.update_weight_transfer_mode
    by_device = device.supports_device_ipc() and features.weight_format == "flattened_bucket"
    return DEVICE_IPC if by_device else COLOCATED


def _drain(stream: Iterator[NamedTensor]) -> None:
    for _ in stream:
        pass
