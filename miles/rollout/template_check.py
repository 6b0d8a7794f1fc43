"""Whether the chat template renders the prompts, asked when flags are parsed.

A template that is broken fails on every row: that is one mistake of the flag which brings it, not
one of each row.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.contracts.types import Prompt
from miles.core import hf
from miles.core.plugins import PluginError
from miles.rollout.chat_template import ChatTemplate
from miles.rollout.row_parser import RowParser
from miles.rollout.rows import Row
from miles.rollout.tool_specs import load_tool_specs

NUM_ROWS = 100
"""Rows that are tried before a template counts as broken; the first that renders ends the search.
"""


def check_file(config: MilesConfig) -> list[Problem]:
    """The file of --chat-template-path is there and holds text."""
    path = config.data.chat_template_path
    if path is None:
        return []
    if not os.path.isfile(path):
        return [problem(config, "chat_template_path", remedy="there is no such file")]
    try:
        text = hf.read_chat_template(path)
    except (OSError, UnicodeDecodeError) as error:
        return [problem(config, "chat_template_path", remedy=f"cannot be read as text: {error}")]
    return [] if text.strip() else [problem(config, "chat_template_path", remedy="is empty")]


def check_rows(
    config: MilesConfig, source: str, rows: Sequence[Row], parser: RowParser
) -> list[Problem]:
    """The template renders some of the ``rows``, each of which ``parser`` accepts without it.

    Loads the tokenizer, which takes seconds, where a row is rendered at all. Files and hooks that
    other checks find missing are left to these.
    """
    talks = [row for row in rows[:NUM_ROWS] if _is_rendered(parser, row)]
    if not talks or check_file(config):
        return []
    path = str(config.rollout.hf_checkpoint)
    try:
        hf.check_directory(path)
        tools = load_tool_specs(config)
    except (hf.CheckpointDirError, PluginError, ImportError, SyntaxError, ConfigError):
        return []
    try:
        tokenizer = hf.load_tokenizer(path, config.data.chat_template_path)
    except hf.CheckpointDirError as error:
        return [problem(config, "hf_checkpoint", remedy=str(error))]
    template = ChatTemplate(tokenizer=tokenizer, kwargs=config.data.apply_chat_template_kwargs)
    rendering = replace(parser, template=template, tools=tools)
    first = ""
    for row in talks:
        result = rendering.parse(row)
        if isinstance(result, Prompt):
            return []
        first = first or f"{result.where}: {result.remedy}"
    rows_tried = "the row" if len(talks) == 1 else f"any of the first {len(talks)} rows"
    remedy = f"the chat template does not render {rows_tried} of {source}: {first}"
    return [problem(config, _dest(config), remedy=remedy)]


def _dest(config: MilesConfig) -> str:
    """The field of the flag that brings the template: where there is none, the one to give."""
    if config.data.chat_template_path is None and config.data.apply_chat_template:
        return "apply_chat_template"
    return "chat_template_path"


def _is_rendered(parser: RowParser, row: Row) -> bool:
    result = parser.parse(row)
    return isinstance(result, Prompt) and result.messages is not None
