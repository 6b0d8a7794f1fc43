"""Groups of samples to plain values and back, exactly: for checkpoints and recorded rollouts.

Plain values are what msgpack holds (so NaN stays NaN); nothing is pickled.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from miles.contracts.types import Group, Prompt, Sample


def prompt_to_plain(prompt: Prompt) -> dict[str, Any]:
    """Raises ``ValueError`` when metadata, messages or tools hold something that is not plain."""
    return _to_plain(prompt, f"prompt {prompt.group_id}")


def prompt_from_plain(plain: dict[str, Any]) -> Prompt:
    return msgspec.convert(plain, Prompt)


def group_to_plain(group: Group) -> dict[str, Any]:
    """The prompt once, then its samples without it. A group is never empty."""
    samples: list[dict[str, Any]] = []
    for sample in group:
        plain = {
            name: _to_plain(getattr(sample, name), f"{name} of sample {sample.index}")
            for name in Sample.__slots__
            if name != "prompt"
        }
        samples.append(plain)
    return {"prompt": prompt_to_plain(group[0].prompt), "samples": samples}


def group_from_plain(plain: dict[str, Any]) -> Group:
    """Undo ``group_to_plain``: the samples share one ``Prompt`` again."""
    prompt = prompt_from_plain(plain["prompt"])
    shared = {"prompt": prompt}
    return [msgspec.convert({**sample, **shared}, Sample) for sample in plain["samples"]]


def groups_to_plain(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [group_to_plain(group) for group in groups]


def groups_from_plain(plain: Sequence[dict[str, Any]]) -> list[Group]:
    return [group_from_plain(group) for group in plain]


def _to_plain(value: Any, what: str) -> Any:
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} cannot be saved: {error}; keep text, numbers, lists and objects there"
        ) from error
