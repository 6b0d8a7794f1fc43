"""Configs and engines for the rollout tests.

``ScriptedEngines`` stands on the engines' side of the ``Generator`` protocol: what it answers is
decided by the test, so that races, aborts and failures happen when the test says so.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from miles.config.root import MilesConfig
from miles.contracts.engine import Completion, GenerateRequest
from miles.contracts.types import Prompt


def made_config(**changes: Any) -> MilesConfig:
    """Defaults with the fields changed that are named (a field name is in one group only)."""
    defaults = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "hf_checkpoint": "made-model",
        "rm_max_retries": 0,
    }
    config = MilesConfig()
    for name, value in {**defaults, **changes}.items():
        (group,) = [g for g in config.to_dict() if name in config.to_dict()[g]]
        config = replace(config, **{group: replace(vars(config)[group], **{name: value})})
    return config


def made_prompt(group_id: int, tokenizer: Any, text: str | None = None, **fields: Any) -> Prompt:
    text = f"p{group_id}" if text is None else text
    return Prompt(group_id=group_id, text=text, tokens=tuple(tokenizer.encode(text)), **fields)


class ScriptedEngines:
    """Answers each request with ``answer(text, request)``: the text to generate, or ``None`` to
    generate slowly: then the request waits until it is aborted and returns ``partial``."""

    def __init__(
        self,
        tokenizer: Any,
        answer: Callable[[str, GenerateRequest], str | None],
        partial: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.partial = partial
        self.requests: list[GenerateRequest] = []
        self.version = 0
        self._abort = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.answer(self.tokenizer.decode(list(request.input_ids)), request)
        if text is not None:
            return [self.completion(text, request)] * request.n
        await self._abort.wait()
        return [self.completion(self.partial, request, aborted=True)] * request.n

    async def abort_all(self) -> None:
        self._abort.set()
        self._abort = asyncio.Event()

    def completion(
        self, text: str, request: GenerateRequest, *, aborted: bool = False
    ) -> Completion:
        ids = self.tokenizer.encode(text)
        full = len(ids) >= request.params.max_new_tokens
        ids = ids[: request.params.max_new_tokens]
        return Completion(
            output_ids=tuple(ids),
            log_probs=tuple(-0.25 * (i + 1) for i in range(len(ids))),
            text=self.tokenizer.decode(ids),
            finish_reason="abort" if aborted else "length" if full else "stop",
            weight_version=self.version,
        )


class ListSource:
    """Prompts ``p0``, ``p1``, ... for ever."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.position = 0

    def __len__(self) -> int:
        return 1000

    def next(self, num_prompts: int) -> list[Prompt]:
        start = self.position
        self.position += num_prompts
        return [made_prompt(i, self.tokenizer) for i in range(start, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
