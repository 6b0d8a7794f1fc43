"""The embedded engine without its HTTP front: loading, and what the server's calls do.

Methods with a body argument run on the scheduler's thread, between two steps (``run``).
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from miles.backends.embedded import protocol
from miles.backends.embedded.memory import WeightMemory
from miles.backends.embedded.protocol import GenerateBody, Refused, Sampling
from miles.backends.embedded.receive import WeightReceiver
from miles.backends.embedded.requests import Request
from miles.backends.embedded.runner import Runner, load_model
from miles.backends.embedded.scheduler import Scheduler
from miles.backends.embedded.waiting import Limits
from miles.core import device, hf, logging

log = logging.get(__name__)

WEIGHT_FORMATS = ("shm_bucket", "group", "disk")
HEALTH_TIMEOUT_S = 20.0
_HOST_SHARE, _DEVICE_SHARE = 0.25, 0.7
"""Of the memory that is free after loading, what the key/value slots may come to use. A host is
shared with other engines and the trainer."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How to start an engine."""

    model_path: str
    dtype: str = "auto"
    """``auto`` (the checkpoint's) or the name of a torch dtype."""
    context_length: int | None = None
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    admission_timeout_s: float = 60.0
    device: str = "auto"


class Engine:
    """A loaded model behind a scheduler."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load. Raises ``ValueError`` when the directory or the architecture cannot be used."""
        hf.check_directory(settings.model_path)
        self.settings = settings
        config = hf.load_config(settings.model_path)
        context_length = _context_length(settings.context_length, hf.context_length(config))
        self.tokenizer = hf.load_tokenizer(settings.model_path)
        where = device.current_device() if settings.device == "auto" else settings.device
        model = load_model(settings.model_path, settings.dtype, torch.device(where))
        self.memory = WeightMemory(model)
        runner = Runner(model, context_length)
        checkpoint_dtype = config.get_text_config().dtype
        self.receiver = WeightReceiver(
            model,
            model.device,
            cast=checkpoint_dtype not in (None, model.dtype),
            stored=hf.tensor_names(settings.model_path),
        )
        limits = Limits(
            max_rows=settings.max_running_requests,
            max_total_tokens=settings.max_total_tokens or _free_tokens(runner),
            context_length=context_length,
        )
        # A fast tokenizer must not encode in one thread while it decodes in another.
        self.scheduler = Scheduler(
            runner, copy.deepcopy(self.tokenizer), limits, settings.admission_timeout_s
        )
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._stop_token_ids = _end_tokens(model, self.tokenizer)
        self._cache_released = False
        self._update_open = False
        self._version_to_come: int | None = None
        self.scheduler.start()

    def run[T](self, function: Callable[[], T]) -> "Future[T]":
        """Run on the scheduler's thread, between two steps."""
        return self.scheduler.call(function)

    # Generation

    def prepare(
        self, body: GenerateBody, rid: str, deliver: Callable[[Request, Exception | None], None]
    ) -> Request:
        """A request for the scheduler. Raises ``Refused``."""
        params = body.sampling_params
        if body.text is not None:
            input_ids: list[int] = self.tokenizer(body.text)["input_ids"]
        else:
            input_ids = body.input_ids or []
        self._check_ids("input_ids", input_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids or [])
        limit = self.scheduler.limits.context_length
        if not input_ids:
            raise Refused("the prompt is empty")
        if len(input_ids) + params.max_new_tokens > limit:
            raise Refused(
                f"{len(input_ids)} prompt tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"the context length {limit}"
            )
        stop_token_ids = {*self._stop_token_ids, *(params.stop_token_ids or ())}
        return Request(
            rid=rid,
            input_ids=input_ids,
            params=params,
            stop_token_ids=() if params.ignore_eos else sorted(stop_token_ids),
            admission=body.admission,
            deliver=deliver,
        )

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if not ids:
            return
        if min(ids) < 0 or max(ids) >= self.scheduler.runner.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.scheduler.runner.vocab_size)
            raise Refused(
                f"{name}: {bad} is not a token id (0 to {self.scheduler.runner.vocab_size - 1})"
            )

    # Control

    def pause(self, body: protocol.PauseBody) -> None:
        self.scheduler.pause(body.mode)

    def resume(self, body: protocol.Empty) -> None:
        if self._update_open:
            raise Refused("a weight update is open: the weights may be half old, half new")
        self.scheduler.resume()

    def abort(self, body: protocol.AbortBody) -> None:
        self.scheduler.abort(body.rid)

    def flush_cache(self, body: protocol.Empty) -> None:
        self.scheduler.drop_cache()

    def release_memory(self, body: protocol.MemoryBody) -> None:
        """Free weights or slots. Sequences in flight must be paused; they are retracted."""
        if len(self.scheduler.rows) and not self.scheduler.paused:
            raise Refused("sequences are running; pause first")
        tags = {"weights", "kv_cache"} if body.tags is None else set(body.tags)
        self.scheduler.retract()
        self.scheduler.drop_cache()
        self._cache_released = self._cache_released or "kv_cache" in tags
        if "weights" in tags:
            self.memory.release()
        self.scheduler.released = self._cache_released or self.memory.released

    def resume_memory(self, body: protocol.MemoryBody) -> None:
        """Undo ``release_memory``. Weights come back unset: all must be loaded."""
        tags = {"weights", "kv_cache"} if body.tags is None else set(body.tags)
        if "kv_cache" in tags:
            self._cache_released = False
        if "weights" in tags:
            self.memory.restore()
        self.scheduler.released = self._cache_released or self.memory.released

    # Weights

    def begin_update(self, body: protocol.Empty) -> None:
        """Open an update: its version counts from ``end_update`` on. Again: start over."""
        self._check_updatable()
        self._update_open = True
        self._version_to_come = None

    def end_update(self, body: protocol.Empty) -> None:
        if not self._update_open:
            raise Refused("no weight update is open")
        self._update_open = False
        if self._version_to_come is not None:
            self.scheduler.weight_version = self._version_to_come

    def update_from_tensor(self, body: protocol.TensorUpdateBody) -> None:
        self._check_updatable()
        self.receiver.load_shm(body.serialized_named_tensors[0])
        self._updated(body.flush_cache, body.weight_version)

    def update_from_group(self, body: protocol.GroupUpdateBody) -> None:
        self._check_updatable()
        self.receiver.load_group(
            names=body.names, dtypes=body.dtypes, shapes=body.shapes, group_name=body.group_name
        )
        self._updated(body.flush_cache, body.weight_version)

    def update_from_disk(self, body: protocol.DiskUpdateBody) -> None:
        self._check_updatable()
        self.receiver.load_disk(body.model_path)
        self._updated(body.flush_cache, body.weight_version)

    def init_group(self, body: protocol.GroupBody) -> None:
        self.receiver.init_group(
            master_address=body.master_address,
            master_port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            group_name=body.group_name,
            backend=body.backend,
            timeout_s=body.timeout_s,
        )

    def set_version(self, body: protocol.VersionBody) -> None:
        self.scheduler.weight_version = int(body.new_version)

    def check_weights(self, body: protocol.CheckBody) -> Mapping[str, Any]:
        if self.memory.released:
            raise Refused("the weights are released; resume them first")
        return {"checksums": self.receiver.checksums()}

    def _check_updatable(self) -> None:
        if not self.scheduler.paused:
            raise Refused("weights are updated only while paused; call /pause_generation first")
        if self.memory.released:
            raise Refused("the weights are released; call /resume_memory_occupation first")

    def _updated(self, flush_cache: bool, version: int | str | None) -> None:
        if flush_cache:
            self.scheduler.drop_cache()
        if version is not None and self._update_open:
            self._version_to_come = int(version)
        elif version is not None:
            self.scheduler.weight_version = int(version)

    # Information (safe from any thread)

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.settings.model_path,
            "tokenizer_path": self.settings.model_path,
            "is_generation": True,
            "weight_version": str(self.scheduler.weight_version),
        }

    def server_info(self) -> dict[str, Any]:
        limits = self.scheduler.limits
        return {
            **self.model_info(),
            "engine": "embedded",
            "dtype": self.dtype,
            "tp_size": 1,
            "context_length": limits.context_length,
            "max_running_requests": limits.max_rows,
            "max_total_num_tokens": limits.max_total_tokens,
            "weight_formats": list(WEIGHT_FORMATS),
            "paused": self.scheduler.paused,
            "released": self.scheduler.released,
        }

    def loads(self) -> dict[str, Any]:
        running = len(self.scheduler.rows)
        waiting = self.scheduler.waiting.num_sequences + len(self.scheduler.admission)
        return {
            "loads": [
                {
                    "dp_rank": 0,
                    "num_running_reqs": running,
                    "num_waiting_reqs": waiting,
                    "num_total_reqs": running + waiting,
                    "max_running_requests": self.scheduler.limits.max_rows,
                }
            ]
        }


def probe_body() -> GenerateBody:
    """One greedy token: what ``/health_generate`` runs."""
    return GenerateBody(
        input_ids=[0], sampling_params=Sampling(temperature=0, max_new_tokens=1, ignore_eos=True)
    )


def _context_length(asked: int | None, model: int | None) -> int:
    if asked is None:
        if model is None:
            raise ValueError("the model's config names no context length; give --context-length")
        return model
    if asked < 2 or (model is not None and asked > model):
        raise ValueError(f"--context-length {asked}: must be 2 to {model}, the model's")
    return asked


def _free_tokens(runner: Runner) -> int:
    if device.has_accelerator() and runner.model.device.type != "cpu":
        usable = torch.accelerator.get_memory_info()[0] * _DEVICE_SHARE
    else:
        usable = psutil.virtual_memory().available * _HOST_SHARE
    return max(1, int(usable) // runner.kv_bytes_per_token)


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for value in (
        model.generation_config.eos_token_id,
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
