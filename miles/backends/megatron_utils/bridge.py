"""Architectures that the core does not know: what the module of ``--spec`` says of them.

A module with an attribute ``BRIDGE`` teaches the backend the model types it names: their
architecture flags and their table of checkpoint tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.megatron_utils import architecture
from miles.backends.megatron_utils.architecture import Flags
from miles.backends.megatron_utils.converters import Converter, Family
from miles.core import hf, plugins

Spec = Sequence[str] | None
"""The words of ``--spec``."""


class BridgeError(ValueError):
    """A spec whose bridge cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """One architecture, as ``architecture.FAMILIES`` and ``converters.FAMILIES`` have it."""

    model_types: tuple[str, ...]
    """``model_type`` of ``config.json``."""
    flags: Callable[[Any], Flags]
    """Megatron's architecture flags of a text config; ``architecture.transformer_flags`` has those
    of most models. Raises ``architecture.UnknownArchitecture``."""
    family: Family
    spec: str | None = None
    """The words of ``--spec`` that select this architecture, for a line of flags that holds them;
    a module that only lends its bridge to others has none."""


def flags_of(hf_config: Any, spec: Spec = None) -> Flags:
    """Megatron's architecture flags of a transformers config.

    Raises ``UnknownArchitecture`` or ``BridgeError``.
    """
    bridge = _bridge(hf_config, spec)
    if bridge is None:
        return architecture.flags_of(hf_config)
    return bridge.flags(hf.text_config(hf_config))


def converter_of(hf_config: Any, spec: Spec = None) -> Converter:
    """The table of a transformers config. Raises ``BridgeError``, and ``ValueError`` that names the
    families there are."""
    bridge = _bridge(hf_config, spec)
    if bridge is None:
        return Converter.for_config(hf_config)
    return Converter.of_family(bridge.family, hf_config)


def _bridge(hf_config: Any, spec: Spec) -> Bridge | None:
    """The spec's, if it is about this model."""
    if not spec:
        return None
    try:
        module = plugins.load_module(spec[0])
    except plugins.PluginError as error:
        raise BridgeError(str(error)) from error
    bridge = vars(module).get("BRIDGE")
    if bridge is None:
        return None
    if not isinstance(bridge, Bridge):
        raise BridgeError(f"BRIDGE of {spec[0]} is a {type(bridge).__name__}, not a Bridge")
    return bridge if hf_config.model_type in bridge.model_types else None
