"""The tools of rows that name none."""

from typing import Any

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.core import plugins


def load_tool_specs(config: MilesConfig) -> tuple[dict[str, Any], ...] | None:
    """The schemas of ``--generate-tool-specs-path``: the tools of rows that name none."""
    path = config.hooks.generate_tool_specs_path
    if path is None:
        return None
    specs = plugins.load_attribute(path)
    if not isinstance(specs, list | tuple) or not all(isinstance(s, dict) for s in specs):
        remedy = "it must name a list of tool schemas (JSON objects)"
        raise ConfigError([Problem("--generate-tool-specs-path", path, remedy)])
    return tuple(specs)
