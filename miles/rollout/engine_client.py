"""The only code that speaks the engine's HTTP protocol: SGLang's, plus four fields of our own
(``sampling_seeds``, ``admission``, ``load_format: "shm_bucket"``, a group's ``timeout_s``) that the
embedded engine reads. To SGLang the first three are never sent, and it ignores the last.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from miles.contracts.engine import (
    Completion,
    EngineError,
    EngineFeatures,
    FinishReason,
    FlattenedRef,
    GenerateRequest,
    GroupRef,
    MemoryTag,
    PauseMode,
    ShmRef,
    WeightFormat,
    WeightGroup,
    WeightRef,
    on_rank,
)
from miles.core.ports import host_and_port
from miles.rollout.router_client import is_a_routers

# Below the 5 s after which uvicorn drops an idle connection: a POST on a connection that the
# server is just closing fails and, unlike a GET, is not repeated.
KEEP_ALIVE_S = 2.0
CONNECT_TIMEOUT_S = 30.0
SETTLE_S = 5.0
"""For what SGLang's scheduler still holds of requests whose answers are there: one more step, which
a pause by abort does not wait for."""


class EngineUnreachable(EngineError):
    """No answer from the engine: refused, dropped or timed out connection; or a router found none
    that answers."""


class _FinishReason(msgspec.Struct):
    type: FinishReason


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    weight_version: int | str = 0
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    cached_tokens: int = 0


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo
    text: str = ""


# SGLang answers a list only where n > 1.
_GENERATE_ANSWER: Any = _Generated | list[_Generated]


class _Success(msgspec.Struct):
    success: bool = True
    message: str = ""


class _Version(msgspec.Struct):
    weight_version: int | str


class _ServerInfo(msgspec.Struct):
    """SGLang advertises no weight formats: it has one of its own."""

    dtype: str
    weight_formats: list[str] = []


class _Parallelism(msgspec.Struct):
    tp_rank: int
    tp_size: int


class _RankChecksums(msgspec.Struct):
    checksums: dict[str, str]
    parallelism_info: _Parallelism


class _Checksums(msgspec.Struct):
    """The embedded engine's, or SGLang's for each tensor-parallel rank."""

    checksums: dict[str, str] = {}
    ranks: list[_RankChecksums] = []


def http_url(host: str, port: int) -> str:
    """``http://host:port``, an IPv6 address in brackets."""
    return f"http://{host_and_port(host, port)}"


def _excerpt(answer: bytes) -> str:
    """The start of an answer, for a message."""
    text = answer[:2000].decode(errors="replace")
    return text + ("…" if len(answer) > 2000 else "")


def _version_number(value: int | str) -> int:
    """A fresh SGLang server calls its weights "default", or what it was launched with; that is our
    version 0."""
    return int(value) if str(value).isdecimal() else 0


def _generate_body(request: GenerateRequest) -> dict[str, Any]:
    params = request.params
    sampling: dict[str, Any] = {
        "n": request.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "stop": params.stop,
        "stop_token_ids": params.stop_token_ids,
        "skip_special_tokens": params.skip_special_tokens,
        "ignore_eos": params.ignore_eos,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if params.sampling_seeds is not None:
        sampling["sampling_seeds"] = params.sampling_seeds
    body: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if request.rid is not None:
        body["rid"] = request.rid
    if request.admission is not None:
        body["admission"] = request.admission
    return body


def _completion(generated: _Generated) -> Completion:
    meta = generated.meta_info
    return Completion(
        output_ids=tuple(token for _, token, _ in meta.output_token_logprobs),
        log_probs=tuple(
            float("nan") if value is None else value for value, _, _ in meta.output_token_logprobs
        ),
        text=generated.text,
        finish_reason=meta.finish_reason.type,
        weight_version=_version_number(meta.weight_version),
        cached_tokens=meta.cached_tokens,
    )


class EngineClient:
    """One engine. Every failure is an ``EngineError``; no answer at all is ``EngineUnreachable``.

    ``timeout_s`` bounds a generate request, ``control_timeout_s`` (default: the same) every other
    call. To be used from one event loop.
    """

    def __init__(
        self, url: str, *, timeout_s: float, control_timeout_s: float | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._control_timeout_s = timeout_s if control_timeout_s is None else control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._has_update_session: bool | None = None
        self._features: EngineFeatures | None = None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The ``request.n`` continuations, in order."""
        answer = await self._call("generate", _generate_body(request), timeout_s=self._timeout_s)
        decoded = self._decode("generate", answer, _GENERATE_ANSWER)
        generated = decoded if isinstance(decoded, list) else [decoded]
        if len(generated) != request.n:
            raise EngineError(
                f"{self.url}/generate: {len(generated)} completions for n={request.n}"
            )
        return [_completion(one) for one in generated]

    async def health(self, timeout_s: float | None = None) -> None:
        """Raise unless the engine is ready."""
        await self._call("health", timeout_s=timeout_s)

    async def server_info(self) -> dict[str, Any]:
        return self._decode("server_info", await self._call("server_info"), dict[str, Any])

    async def features(self) -> EngineFeatures:
        """What this server has that others have not. Asked once."""
        if self._features is None:
            info = self._decode("server_info", await self._call("server_info"), _ServerInfo)
            embedded = "shm_bucket" in info.weight_formats
            self._features = EngineFeatures(
                weight_format="shm_bucket" if embedded else "flattened_bucket",
                dtype=info.dtype,
                checksums="tensors" if embedded else "fused",
            )
        return self._features

    async def weight_version(self) -> int:
        answer = self._decode("model_info", await self._call("model_info"), _Version)
        return _version_number(answer.weight_version)

    async def pause(self, mode: PauseMode) -> None:
        await self._command("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._command("continue_generation", {})

    async def flush_cache(self, *, unless_busy: bool = False) -> None:
        """Forget the keys and values of all prompts. With requests in flight an engine refuses,
        which is no failure with ``unless_busy``."""
        # Nothing settles under requests that are paused in place.
        call = "flush_cache" if unless_busy else f"flush_cache?timeout={SETTLE_S:g}"
        status, answer = await self._request(call, {}, SETTLE_S + self._control_timeout_s)
        if status != 200 and not (unless_busy and status == 400):
            raise EngineError(f"{self.url}/flush_cache: status {status}: {_excerpt(answer)}")

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is in flight and forget all keys and values. What still runs after
        ``timeout_s`` is aborted; raises when that does not end it within as long again."""
        call = f"flush_cache?timeout={timeout_s:g}"
        limit_s = timeout_s + self._control_timeout_s
        status, answer = await self._request(call, {}, limit_s)
        if status == 400:
            await self.abort()
            status, answer = await self._request(call, {}, limit_s)
        if status != 200:
            raise EngineError(f"{self.url}/{call}: status {status}: {_excerpt(answer)}")

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all of them."""
        await self._call("abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def begin_weight_update(self) -> None:
        """Open an update on servers that have such a session. Asked once: a 404 means none."""
        if self._has_update_session is False:
            return
        status, answer = await self._request("begin_weight_update", {}, None)
        self._has_update_session = status != 404
        if self._has_update_session:
            self._check_answer("begin_weight_update", status, answer)

    async def end_weight_update(self, version: int) -> None:
        """Close the update that ``begin_weight_update`` opened; ``version`` came with its loads.

        Raises when the engine does not report that version afterwards."""
        if self._has_update_session:
            await self._command("end_weight_update", {})
        reported = await self.weight_version()
        if reported != version:
            raise EngineError(
                f"{self.url}: reports weight version {reported} after the update to {version}"
            )

    async def load(self, ref: WeightRef, version: int) -> None:
        """Load one bucket; returns when its bytes are in the model."""
        update = {"flush_cache": False, "weight_version": str(version)}
        match ref:
            case ShmRef():
                entries = [(s.name, s.dtype, s.shape, offset) for s, offset in ref.entries]
                payload = {"shm": ref.shm_name, "nbytes": ref.num_bytes, "entries": entries}
                await self._load_tensor(
                    "shm_bucket", [msgspec.json.encode(payload).decode()], update
                )
            case FlattenedRef():
                await self._load_tensor("flattened_bucket", ref.serialized, update)
            case GroupRef():
                await self._command(
                    "update_weights_from_distributed",
                    {
                        "names": [s.name for s in ref.entries],
                        "dtypes": [s.dtype for s in ref.entries],
                        "shapes": [s.shape for s in ref.entries],
                        "group_name": ref.group_name,
                        **update,
                    },
                )

    async def _load_tensor(
        self, load_format: WeightFormat, serialized: Sequence[str], update: Mapping[str, Any]
    ) -> None:
        await self._command(
            "update_weights_from_tensor",
            {"load_format": load_format, "serialized_named_tensors": serialized, **update},
        )

    async def load_disk(self, path: str, version: int) -> None:
        """Load a Hugging Face directory that the engine can read."""
        await self._command(
            "update_weights_from_disk",
            {"model_path": path, "flush_cache": False, "weight_version": str(version)},
        )

    async def init_weight_group(self, group: WeightGroup, rank_offset: int) -> None:
        """Join; returns when all members have."""
        await self._command(
            "init_weights_update_group",
            {
                "master_address": group.master_address,
                "master_port": group.master_port,
                "rank_offset": rank_offset,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.backend,
                "timeout_s": group.timeout_s,
            },
        )

    async def destroy_weight_group(self, name: str) -> None:
        await self._command("destroy_weights_update_group", {"group_name": name})

    async def weight_checksums(self) -> dict[str, str]:
        """Name -> digest, of what ``features`` says.

        Raises ``EngineError`` for an engine whose ranks are not all tensor-parallel ones."""
        answer = await self._command("weights_checker", {"action": "checksum"})
        found = self._decode("weights_checker", answer, _Checksums)
        if not found.ranks:
            return found.checksums
        layout = sorted(
            (r.parallelism_info.tp_rank, r.parallelism_info.tp_size) for r in found.ranks
        )
        size = len(found.ranks)
        if layout != [(rank, size) for rank in range(size)]:
            raise EngineError(
                f"{self.url}/weights_checker: checksums of tensor-parallel (rank, size) {layout}: "
                "what each should hold is known of one group of such ranks alone"
            )
        return {
            on_rank(name, rank.parallelism_info.tp_rank, size): digest
            for rank in found.ranks
            for name, digest in rank.checksums.items()
        }

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("resume_memory_occupation", {"tags": list(tags)})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _command(self, call: str, body: Mapping[str, Any]) -> bytes:
        """A POST whose answer says ``success``: SGLang reports failures with status 200 too."""
        status, answer = await self._request(call, body, None)
        self._check_answer(call, status, answer)
        return answer

    def _check_answer(self, call: str, status: int, answer: bytes) -> None:
        if status != 200:
            raise EngineError(f"{self.url}/{call}: status {status}: {_excerpt(answer)}")
        result = self._decode(call, answer, _Success)
        if not result.success:
            raise EngineError(f"{self.url}/{call}: failed: {result.message or _excerpt(answer)}")

    def _decode[T](self, call: str, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{self.url}/{call}: malformed answer ({error}): {_excerpt(answer)}"
            ) from error

    async def _call(
        self,
        call: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        status, answer = await self._request(call, body, timeout_s)
        if status != 200:
            kind = EngineUnreachable if is_a_routers(status, answer) else EngineError
            raise kind(f"{self.url}/{call}: status {status}: {_excerpt(answer)}")
        return answer

    async def _request(
        self, call: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        """GET without a body, else POST as JSON: the status and the answer."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                f"{self.url}/{call}",
                data=data,
                headers=headers,
                timeout=timeout,
            ) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnreachable(
                f"{self.url}/{call}: no answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"{self.url}/{call}: no answer: {type(error).__name__}: {error}"
            ) from error
