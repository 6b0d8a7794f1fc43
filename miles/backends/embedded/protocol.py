"""SGLang's HTTP protocol as far as the embedded engine speaks it: request bodies and answers.

Bodies are decoded strictly: a wrong type, a value out of range or an unknown field is refused with
a message that names it.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from miles.contracts.engine import MemoryTag, PauseMode

MAX_SAMPLES = 4096
"""Largest ``n`` of one request."""

NonEmpty = Annotated[str, Meta(min_length=1)]
Version = int | Annotated[str, Meta(pattern=r"^\d{1,18}$")]


class Refused(ValueError):
    """A request that the engine does not accept as it is, or not now. Answered with 400."""


class Failed(RuntimeError):
    """The engine could not do what was asked. Answered with 500."""


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Sampling(_Body):
    """``sampling_params``. Top-k and top-p are judged on the same, unfiltered distribution."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    """-1: off."""
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 128
    stop: NonEmpty | list[NonEmpty] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    """Go on after any stop token, those of ``stop_token_ids`` too (as SGLang does)."""
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    no_stop_trim: bool = False
    """Leave the stop token or stop string in ``text``."""
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None
    sampling_seeds: list[int] | None = None
    """One for each of the ``n`` samples (not in SGLang)."""

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is -1 (off) or at least 1")
        if self.sampling_seeds is not None and self.sampling_seed is not None:
            raise ValueError("give sampling_seed or sampling_seeds, not both")
        if self.sampling_seeds is not None and len(self.sampling_seeds) != self.n:
            raise ValueError(f"{len(self.sampling_seeds)} sampling_seeds for n = {self.n}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerateBody(_Body):
    """``POST /generate``."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    return_logprob: bool = False
    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream: Literal[False] = False
    admission: (
        tuple[
            Annotated[str, Meta(max_length=256)],
            Annotated[int, Meta(ge=0)],
            Annotated[int, Meta(ge=1)],
        ]
        | None
    ) = None
    """``[key, position, count]`` (not in SGLang): see ``admission.py``."""
    # What SGLang's router adds to a request, with the values that change nothing here.
    model: str | None = None
    log_metrics: bool = True
    no_logs: bool = False
    background: Literal[False] = False
    return_bytes: Literal[False] = False
    return_entropy: Literal[False] = False
    return_hidden_states: Literal[False] = False
    return_text_in_logprobs: Literal[False] = False

    def __post_init__(self) -> None:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give input_ids or text")
        if self.admission is not None and self.admission[1] >= self.admission[2]:
            raise ValueError(f"admission position {self.admission[1]} of {self.admission[2]}")


class Empty(_Body):
    """A command without arguments."""


class PauseBody(_Body):
    mode: PauseMode = "abort"


class AbortBody(_Body):
    rid: str | None = None
    abort_all: bool = False

    def __post_init__(self) -> None:
        if (self.rid is None) != self.abort_all:
            raise ValueError("give rid or abort_all: true")


class MemoryBody(_Body):
    tags: list[MemoryTag] | None = None
    """``None``: all."""


class VersionBody(_Body):
    new_version: Version
    abort_all_requests: Literal[False] = False


class TensorUpdateBody(_Body):
    """``POST /update_weights_from_tensor``; see ``receive.py`` for the payload."""

    serialized_named_tensors: Annotated[list[str], Meta(min_length=1, max_length=1)]
    load_format: Literal["shm_bucket"]
    flush_cache: bool = True
    weight_version: Version | None = None


class GroupUpdateBody(_Body):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]
    group_name: str
    flush_cache: bool = True
    weight_version: Version | None = None


class DiskUpdateBody(_Body):
    model_path: str
    load_format: Literal["auto"] | None = None
    flush_cache: bool = True
    weight_version: Version | None = None


class GroupBody(_Body):
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=0)]
    world_size: Annotated[int, Meta(ge=1)]
    group_name: str
    backend: Literal["gloo", "nccl"]
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Bound of the rendezvous and of each collective (not in SGLang)."""


class GroupNameBody(_Body):
    group_name: str


class CheckBody(_Body):
    action: Literal["checksum"]


def decode[T](data: bytes, kind: type[T]) -> T:
    """A body from its JSON bytes; nothing at all means ``{}``. Raises ``Refused``."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(str(error)) from error


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)
