"""``--rm-type remote_rm``: a reward behind HTTP."""

import aiohttp

from miles.config.root import MilesConfig
from miles.contracts.types import Sample


async def remote_rm(sample: Sample, answer: str, config: MilesConfig) -> float | dict[str, object]:
    """POST ``{"prompt", "response", "label"}`` as JSON to ``--rm-url``; the answer is a number, or
    an object for ``--reward-key``."""
    url = config.reward.rm_url
    if url is None:
        raise ValueError("--rm-type remote_rm needs --rm-url")
    body = {"prompt": sample.prompt.text, "response": answer, "label": sample.prompt.label}
    timeout = aiohttp.ClientTimeout(total=config.reward.rm_timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=body) as response,
    ):
        response.raise_for_status()
        return await response.json(content_type=None)
