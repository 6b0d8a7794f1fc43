"""Whether the key/value cache of an engine holds the longest sequence that the flags allow."""

from collections.abc import Mapping, Sequence
from typing import Any

from miles.backends.sglang_utils.package import UNSERVED_TOKENS
from miles.config.root import MilesConfig
from miles.contracts.engine import EngineError
from miles.core import logging
from miles.ray.errors import JobError
from miles.rollout.engine_client import EngineClient

logger = logging.get(__name__)

TIMEOUT_S = 60.0


async def require_capacity(config: MilesConfig, urls: Sequence[str]) -> None:
    """Ask every engine. Raises ``JobError`` for one that could give no prompt of the allowed length
    a whole response: SGLang would end it early without a word, the embedded engine refuse it."""
    for url in urls:
        client = EngineClient(url, timeout_s=TIMEOUT_S)
        try:
            check_capacity(config, url, await client.server_info())
        except EngineError as error:
            raise JobError(str(error)) from error
        finally:
            await client.close()


def check_capacity(config: MilesConfig, url: str, info: Mapping[str, Any]) -> None:
    """Hold one engine's ``/server_info`` against the flags. Raises ``JobError``."""
    if "max_total_num_tokens" not in info:
        return
    rollout, holds = config.rollout, _most_tokens(info)
    responses = (rollout.rollout_max_response_len, config.evaluation.eval_max_response_len)
    response = max(length or 1 for length in responses)
    bounds = [rollout.rollout_max_context_len, rollout.sglang_context_length]
    context = min((bound for bound in bounds if bound is not None), default=None)
    prompt = rollout.rollout_max_prompt_len
    least = response + (prompt or 1)
    longest = least if context is None else min(least, context)
    flags = "--rollout-max-response-len" + (" and --rollout-max-prompt-len" if prompt else "")
    remedy = (
        "give it more (--sglang-mem-fraction-static, --sglang-max-total-tokens, or more GPUs an "
        f"engine), or lower {flags}"
    )
    if longest > holds:
        raise JobError(
            f"{flags}: a prompt and its response may have {longest} tokens, and the key/value "
            f"cache of the engine {url} holds {holds}; {remedy}"
        )
    if prompt is None and context is not None and context > holds:
        logger.warning(
            "the key/value cache of the engine %s holds %d tokens: prompts of more than %d get no "
            "whole response; %s, or leave them out (--rollout-max-prompt-len)",
            *(url, holds, holds - response, remedy),
        )


def _most_tokens(info: Mapping[str, Any]) -> int:
    """Of one request. SGLang keeps a page free behind a prompt that it rounds up to pages."""
    total: int = info["max_total_num_tokens"]
    if info.get("engine") == "embedded":
        return total
    return total - max(UNSERVED_TOKENS, 2 * info.get("page_size", 1))
