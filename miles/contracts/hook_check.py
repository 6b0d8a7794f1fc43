"""Checks the user's code when the command line is parsed, before any process starts."""

import inspect
from collections.abc import Callable
from typing import Any

from miles.config.errors import Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem, values_of
from miles.contracts.hooks import HOOKS, DataSource, data_source, group_reward
from miles.core.plugins import PluginError, check_parameters, load_attribute, load_function


def check_hooks(config: MilesConfig) -> list[Problem]:
    """Every hook that is given can be imported and called as its signature says."""
    values = values_of(config)
    expected: dict[str, Callable[..., Any]] = dict(HOOKS)
    if config.reward.group_rm:
        expected["custom_rm_path"] = group_reward
    problems: list[Problem] = []
    for dest, signature in expected.items():
        path = values[dest]
        fault = None if path is None else _fault(path, signature)
        if fault is not None:
            problems.append(problem(config, dest, remedy=fault))
    return problems + _tool_specs(config)


def _fault(path: str, signature: Callable[..., Any]) -> str | None:
    try:
        function = load_function(path, signature)
    except PluginError as error:
        return str(error)
    return _unlike_a_data_source(path, function) if signature is data_source else None


def _unlike_a_data_source(path: str, found: Any) -> str | None:
    """Why what is called with ``(config, tokenizer)`` does not make a data source."""
    if not inspect.isclass(found):
        return f"{path!r} is no class; give one made with (config, tokenizer)"
    wanted = {
        name: member
        for name, member in vars(DataSource).items()
        if inspect.isfunction(member) and (name == "__len__" or not name.startswith("_"))
    }
    missing = [name for name in wanted if not callable(getattr(found, name, None))]
    if missing:
        return f"the class lacks {', '.join(missing)} of a data source"
    abstract = [
        n for n, m in inspect.getmembers(found) if getattr(m, "__isabstractmethod__", False)
    ]
    if abstract:
        return f"the class leaves {', '.join(abstract)} abstract"
    try:
        for name, member in wanted.items():
            method = f"{path}.{name}"
            check_parameters(method, getattr(found, name), inspect.signature(member))
    except PluginError as error:
        return str(error)
    return None


def _tool_specs(config: MilesConfig) -> list[Problem]:
    path = config.hooks.generate_tool_specs_path
    if path is None:
        return []
    try:
        specs = load_attribute(path)
    except PluginError as error:
        return [problem(config, "generate_tool_specs_path", remedy=str(error))]
    if isinstance(specs, list | tuple) and all(isinstance(spec, dict) for spec in specs):
        return []
    remedy = "must name a list of tool schemas (objects)"
    return [problem(config, "generate_tool_specs_path", remedy=remedy)]
