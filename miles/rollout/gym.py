"""Task families of reasoning-gym as prompt data: their arguments, checked, and their problems."""

from typing import Any, get_type_hints

import msgspec

from miles.config.data import DataConfig
from miles.config.errors import ConfigError, Problem
from miles.config.values import did_you_mean

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What families raise for arguments that they cannot work with."""


def unknown_family(name: object) -> str | None:
    """What to say of a name that no family has; ``None``: one has it."""
    from reasoning_gym.factory import DATASETS

    if isinstance(name, str) and name in DATASETS:
        return None
    families = sorted(DATASETS)
    hint = did_you_mean(name, families) if isinstance(name, str) else ""
    return f"reasoning-gym has no such family; {hint or f'it has {", ".join(families)}'}"


def check_arguments(flag: str, spec: str, family: str, rows: slice, data: DataConfig) -> None:
    """Raise ``ConfigError`` for arguments that the family refuses, or that leave no problem in the
    slice. Makes no problem, which takes a while."""
    from reasoning_gym.factory import DATASETS

    _, config_type = DATASETS[family]
    hints = get_type_hints(config_type)
    settings = _settings(data)
    faults = [fault for key, value in settings.items() if (fault := _fault(key, value, hints))]
    if faults:
        raise _refusal(family, data, "; ".join(faults))
    try:
        config: Any = config_type(**settings)
        if hasattr(config, "validate"):
            config.validate()
    except _REFUSALS as error:
        raise _refusal(family, data, str(error) or type(error).__name__) from error
    if not range(config.size)[rows]:
        remedy = (
            f"no problem is left of {config.size}; give another slice, or a size "
            "(--prompt-data-kwargs)"
        )
        raise ConfigError([Problem(flag, spec, remedy)])


def make_entries(family: str, data: DataConfig) -> list[dict[str, Any]]:
    """A family's problems as the values of rows. Without a seed in ``--prompt-data-kwargs`` it is
    the rollout's.

    The metadata says how to make the problem again, which is what its grader needs. Raises
    ``ConfigError``.
    """
    import reasoning_gym

    settings = _settings(data)
    try:
        dataset = reasoning_gym.create_dataset(family, **settings)
        entries = [dataset[index] for index in range(len(dataset))]
    except _REFUSALS as error:
        raise _refusal(family, data, f"{type(error).__name__}: {error}") from error
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": {"reasoning_gym": {"family": family, "kwargs": settings, "index": index}},
        }
        for index, entry in enumerate(entries)
    ]


def _settings(data: DataConfig) -> dict[str, Any]:
    return {"seed": data.rollout_seed, **data.prompt_data_kwargs}


def _fault(key: str, value: object, hints: dict[str, Any]) -> str | None:
    if key not in hints:
        hint = did_you_mean(key, list(hints)) or f"there are {', '.join(sorted(hints))}"
        return f"there is no {key!r}, {hint}"
    try:
        msgspec.convert(value, hints[key])
    except msgspec.ValidationError as error:
        return f"{key!r} is {value!r}: {error}"
    return None


def _refusal(family: str, data: DataConfig, reason: str) -> ConfigError:
    remedy = f"reasoning-gym's {family} refuses these arguments: {reason}; correct them"
    return ConfigError([Problem("--prompt-data-kwargs", data.prompt_data_kwargs, remedy)])
