"""Prompt data to ``Prompt`` values, and the endless, shuffled, resumable stream of them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import xxhash

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.config.rules.problems import problem
from miles.contracts.hooks import DataSource, load_hook
from miles.contracts.types import Prompt
from miles.core import logging
from miles.rollout import gym, template_check
from miles.rollout.chat_template import ChatTemplate
from miles.rollout.rewards.table import BOXED_PREFIX, REMOTE, asks_remote, reads_label
from miles.rollout.row_parser import RowParser
from miles.rollout.rows import (
    GYM_KEYS,
    BadRow,
    Row,
    RowKeys,
    check_spec,
    parse_spec,
    read_rows,
    refuse_bad_rows,
)
from miles.rollout.tool_specs import load_tool_specs

log = logging.get(__name__)


def check(config: MilesConfig) -> list[Problem]:
    """What is wrong with the data flags and with the rows of files."""
    problems = list[Problem]()
    data_sets = list[tuple[str, str, MilesConfig]]()
    spec = config.data.prompt_data
    if spec is not None:
        data_sets.append(("--prompt-data", spec, config))
    elif config.hooks.data_source_path is None and reads_prompts(config):
        problems.append(Problem("--prompt-data", None, "give the prompts (or --data-source-path)"))
    pairs = config.evaluation.eval_prompt_data
    names = pairs[::2]
    if len(pairs) % 2 or len(set(names)) < len(names):
        remedy = "give pairs of a name of its own and its data: name file [name file ...]"
        problems.append(Problem("--eval-prompt-data", pairs, remedy))
        pairs = ()
    evaluation = evaluation_config(config)
    data_sets += [("--eval-prompt-data", eval_spec, evaluation) for eval_spec in pairs[1::2]]
    template = list[Problem]()
    remote = _needs_address_by_flags(config)
    for flag, spec, settings in data_sets:
        try:
            rows, parser = usable_rows(flag, spec, settings)
        except ConfigError as error:
            # Two sets of families have the same arguments: what is wrong with them is said once.
            problems += [p for p in error.problems if p not in problems]
            continue
        remote = remote or _names_remote(rows, parser)
        # One template renders them all: what is wrong with it is said of the first.
        template = template or template_check.check_rows(settings, f"{flag} {spec}", rows, parser)
    if not remote and not problems:
        remedy = (
            "applies only with --rm-type remote_rm, or to rows whose metadata.rm_type is "
            "remote_rm; change that or leave this out"
        )
        problems.append(Problem("--rm-url", config.reward.rm_url, remedy))
    return [*problems, *template]


def _needs_address_by_flags(config: MilesConfig) -> bool:
    """Whether the flags alone settle that --rm-url has its place, or is not there."""
    reward, hooks = config.reward, config.hooks
    by_type = (reward.rm_type or "").removeprefix(BOXED_PREFIX) == REMOTE
    elsewhere = hooks.custom_rm_path is not None or hooks.data_source_path is not None
    return reward.rm_url is None or by_type or elsewhere


def _names_remote(rows: Sequence[Row], parser: RowParser) -> bool:
    prompts = map(parser.parse, rows)
    return any(isinstance(p, Prompt) and asks_remote(p.metadata) for p in prompts)


def usable_rows(flag: str, spec: str, config: MilesConfig) -> tuple[list[Row], RowParser]:
    """The rows of a data set, and what has found nothing wrong with their keys and types.

    Of a family, whose problems take a while to make, one that stands for them. Raises
    ``ConfigError``.
    """
    problems = check_spec(flag, spec)
    if problems:
        raise ConfigError(problems)
    parsed = parse_spec(spec)
    if parsed.family is not None:
        gym.check_arguments(flag, spec, parsed.family, parsed.rows, config.data)
        parser = replace(_row_parser(config, GYM_KEYS), reads_label=lambda metadata: False)
        return [Row("a problem", {"question": "1 + 1 =", "answer": "2"})], parser
    rows, keys = read_rows(flag, spec, config.data)
    parser = _row_parser(config, keys)
    prompts = [parser.parse(row) for row in rows]
    refuse_bad_rows(flag, spec, [row for row in prompts if isinstance(row, BadRow)])
    return [row for row in rows if isinstance(row, Row)], parser


def reads_prompts(config: MilesConfig) -> bool:
    """Whether the job takes prompts: recorded rollouts have theirs, but a user's evaluation
    function gets the source."""
    recorded = config.observability.load_debug_rollout_data is not None
    return not recorded or config.hooks.eval_function_path is not None


def make_source(config: MilesConfig, tokenizer: Any) -> DataSource:
    """The prompt stream of the job: ``--data-source-path``, or the rows of ``--prompt-data``."""
    custom = load_hook("data_source_path", config.hooks.data_source_path)
    return custom(config, tokenizer) if custom is not None else PromptSource(config, tokenizer)


def eval_sources(config: MilesConfig, tokenizer: Any) -> dict[str, list[Prompt]]:
    """The prompts of each evaluation set; ``group_id`` is the position in the set."""
    pairs = config.evaluation.eval_prompt_data
    evaluation = evaluation_config(config)
    return {
        name: load_prompts("--eval-prompt-data", spec, evaluation, tokenizer)
        for name, spec in zip(pairs[::2], pairs[1::2], strict=True)
    }


def evaluation_config(config: MilesConfig) -> MilesConfig:
    """The config with the keys of evaluation's rows."""
    data = replace(
        config.data,
        input_key=config.evaluation.eval_input_key or config.data.input_key,
        label_key=config.evaluation.eval_label_key or config.data.label_key,
    )
    # Evaluation generates and scores, also when the loss is supervised.
    algorithm = replace(config.algorithm, loss_type="policy_loss")
    return replace(config, data=data, algorithm=algorithm)


class PromptSource:
    """The prompts of ``--prompt-data``, epoch after epoch; see ``contracts.hooks.DataSource``.

    Each epoch is the data in order, or under ``--rollout-shuffle`` its permutation by
    ``random.Random(seed + epoch)``; the stream is thus a function of the data, the seed and the
    position, and the position is the state. ``next`` goes on into the following epoch where one
    ends, also several times.
    """

    def __init__(self, config: MilesConfig, tokenizer: Any) -> None:
        spec = config.data.prompt_data
        if spec is None:
            raise ConfigError([Problem("--prompt-data", None, "give the prompts")])
        self._config = config
        self._prompts = load_prompts("--prompt-data", spec, config, tokenizer)
        self._seed = config.data.rollout_seed if config.data.rollout_shuffle else None
        self._position = 0
        self._order_epoch = -1
        self._order: Sequence[int] = ()
        digest = xxhash.xxh3_128()
        for prompt in self._prompts:
            digest.update(f"{len(prompt.text)}:{prompt.text}{prompt.label}".encode())
        self._identity = {
            "num_prompts": len(self._prompts),
            "fingerprint": digest.hexdigest(),
            "shuffle_seed": self._seed,
        }

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, num_prompts: int) -> list[Prompt]:
        prompts = [self._at(self._position + i) for i in range(num_prompts)]
        self._position += num_prompts
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ConfigError`` when the state is of other data, another seed or shuffling."""
        of_data = _dests_of_data(self._config)
        differences = {
            "num_prompts": (of_data, f"{state['num_prompts']} prompts, these are {len(self)}"),
            "fingerprint": (of_data, "other prompts"),
            "shuffle_seed": (("rollout_seed", "rollout_shuffle"), "another order of prompts"),
        }
        for key, (dests, what) in differences.items():
            if state[key] != self._identity[key]:
                remedy = (
                    f"the checkpoint is of a run with {what}: resume with the same data and flags, "
                    "or start a new run without --load"
                )
                raise ConfigError([problem(self._config, *dests, remedy=remedy)])
        self._position = state["position"]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        if epoch != self._order_epoch:
            order = list(range(len(self._prompts)))
            if self._seed is not None:
                random.Random(self._seed + epoch).shuffle(order)
            self._order_epoch, self._order = epoch, order
        return replace(self._prompts[self._order[offset]], group_id=position)


def _dests_of_data(config: MilesConfig) -> tuple[str, ...]:
    """Which flags say what the prompts are."""
    data = config.data
    if parse_spec(str(data.prompt_data)).family is None:
        return ("prompt_data",)
    seed = () if "seed" in data.prompt_data_kwargs else ("rollout_seed",)
    return ("prompt_data", "prompt_data_kwargs", *seed)


def load_prompts(flag: str, spec: str, config: MilesConfig, tokenizer: Any) -> list[Prompt]:
    """Read, render and encode prompt data; ``group_id`` is the position among the prompts kept.

    Rendered text is encoded as it is; raw text as the tokenizer does by default (with a
    beginning-of-text token where it adds one). Raises ``ConfigError`` listing every bad row, or
    when no prompt is left.
    """
    rows, keys = read_rows(flag, spec, config.data)
    kwargs = config.data.apply_chat_template_kwargs
    template = ChatTemplate(tokenizer=tokenizer, kwargs=kwargs)
    parser = replace(_row_parser(config, keys), template=template, tools=load_tool_specs(config))
    parsed = [parser.parse(row) for row in rows]
    refuse_bad_rows(flag, spec, [row for row in parsed if isinstance(row, BadRow)])
    prompts = _encode([p for p in parsed if isinstance(p, Prompt)], tokenizer)
    empty = [
        BadRow(row.where, "the prompt has no token; remove the row")
        for row, prompt in zip(rows, prompts, strict=True)
        if not prompt.tokens
    ]
    refuse_bad_rows(flag, spec, empty)
    return _leave_out_long(flag, spec, prompts, config)


def _row_parser(config: MilesConfig, keys: RowKeys) -> RowParser:
    """One that checks rows alone."""
    return RowParser(
        keys=keys,
        template=None,
        apply_chat_template=config.data.apply_chat_template,
        supervised=config.algorithm.loss_type == "sft_loss",
        reads_label=partial(reads_label, config=config),
        tools=None,
    )


def _encode(prompts: Sequence[Prompt], tokenizer: Any) -> list[Prompt]:
    """Fill in the tokens; all texts of a kind in one call, which is many times faster."""
    tokens: dict[int, list[int]] = {}
    for rendered in (True, False):
        chosen = [i for i, p in enumerate(prompts) if (p.messages is not None) is rendered]
        if chosen:
            texts = [prompts[i].text for i in chosen]
            ids = tokenizer(texts, add_special_tokens=not rendered)["input_ids"]
            tokens.update(zip(chosen, ids, strict=True))
    return [replace(p, tokens=tuple(tokens[i])) for i, p in enumerate(prompts)]


def _leave_out_long(
    flag: str, spec: str, prompts: Sequence[Prompt], config: MilesConfig
) -> list[Prompt]:
    """Drop prompts that are too long or leave no room for a response; number the others."""
    limits = dict[str, int]()
    if config.rollout.rollout_max_prompt_len is not None:
        limits["--rollout-max-prompt-len"] = config.rollout.rollout_max_prompt_len
    if config.rollout.rollout_max_context_len is not None:
        limits["--rollout-max-context-len"] = config.rollout.rollout_max_context_len - 1
    limit_flag = min(limits, key=lambda name: limits[name], default=None)
    if limit_flag is None:
        return [replace(p, group_id=i) for i, p in enumerate(prompts)]
    limit = limits[limit_flag]
    kept = [p for p in prompts if len(p.tokens) <= limit]
    if not kept:
        shortest = min(len(p.tokens) for p in prompts)
        remedy = f"every prompt of {flag} {spec} is longer; the shortest has {shortest} tokens"
        raise ConfigError([Problem(limit_flag, limit, remedy)])
    if len(kept) < len(prompts):
        left_out = len(prompts) - len(kept)
        log.warning(
            "%s %s: %d of %d prompts are longer than %d tokens (%s) and left out",
            *(flag, spec, left_out, len(prompts), limit, limit_flag),
        )
    return [replace(p, group_id=i) for i, p in enumerate(kept)]
