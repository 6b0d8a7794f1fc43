"""Hugging Face checkpoints <-> Megatron tensors: a table of pure tensor functions per family.

A new family is one small file with ``entries(text_config)`` and a line in ``FAMILIES``, or in the
``BRIDGE`` of a ``--spec`` module (``bridge.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.megatron_utils.converters import (
    llama,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from miles.backends.megatron_utils.converters.table import Entry
from miles.core import hf


@dataclass(frozen=True)
class Family:
    """How checkpoints of one ``model_type`` are converted."""

    entries: Callable[[Any], list[Entry]]
    """From the text part of the config."""
    not_trained: tuple[str, ...] = ()
    """Prefixes of checkpoint tensors that the Megatron model does not have."""


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.entries),
    "qwen2": Family(qwen2.entries),
    "qwen3": Family(qwen3.entries),
    "qwen3_moe": Family(qwen3_moe.entries),
    "qwen3_5": Family(qwen3_5.entries_with_vision, qwen3_5.NOT_TRAINED),
    "qwen3_5_text": Family(qwen3_5.entries, qwen3_5.NOT_TRAINED),
}
"""By ``model_type`` of ``config.json``."""


class Converter:
    """The table of one model."""

    def __init__(self, entries: Sequence[Entry], not_trained: tuple[str, ...] = ()) -> None:
        self._entries = tuple(entries)
        self.not_trained = not_trained
        """Prefixes of checkpoint tensors that the Megatron model does not have."""

    @classmethod
    def for_config(cls, hf_config: Any) -> "Converter":
        """The converter of a transformers config.

        Raises ``ValueError`` that names the families there are.
        """
        family = FAMILIES.get(hf_config.model_type)
        if family is None:
            raise ValueError(
                f"model_type {hf_config.model_type!r} has no converter to Megatron; there are: "
                f"{', '.join(sorted(FAMILIES))}. The FSDP backend needs none; a --spec module may "
                "bring one."
            )
        return cls.of_family(family, hf_config)

    @classmethod
    def of_family(cls, family: Family, hf_config: Any) -> "Converter":
        """The same for a family that is not in the table of families."""
        return cls(family.entries(hf.text_config(hf_config)), family.not_trained)

    def entries(self) -> Sequence[Entry]:
        """In the order of the transformers model."""
        return self._entries
