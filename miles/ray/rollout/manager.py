"""``RolloutManager``: the actor that owns prompts, pool, rollout function and evaluation."""

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import ray

from miles.backends.training_utils import checkpoints
from miles.config.derived import generates_rollouts
from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.hooks import DataSource, RolloutContext, RolloutOutput, load_hook
from miles.contracts.types import Group, Prompt
from miles.core import hf, logging
from miles.rollout import batch, debug_data, supervised
from miles.rollout.collect import Collector
from miles.rollout.context import with_context_length
from miles.rollout.engine_set import EngineAddresses
from miles.rollout.evaluate import evaluate
from miles.rollout.pool import EnginePool
from miles.rollout.prompts import eval_sources, make_source, reads_prompts

STATE_FILE = "rollout_state.msgpack"

log = logging.get(__name__)


@dataclass(frozen=True, kw_only=True)
class GeneratedBatch:
    """What the driver gets of a rollout: references to the shards, and what to show."""

    shards: list[Any]
    """One store reference for each data-parallel rank."""
    metrics: Mapping[str, float]
    samples: list[dict[str, Any]]
    """A few samples as plain values, for the samples file."""
    num_tokens: int


class RolloutManager:
    """Ray actor (async). Everything above the engines and below the trainer happens here."""

    def __init__(self, config: MilesConfig, unserved_tokens: int = 0) -> None:
        """``unserved_tokens``: of the engines' context, see ``with_context_length``."""
        logging.setup("rollout")
        self._unserved_tokens = unserved_tokens
        self._config = config
        self._tokenizer: Any = None
        self._source: DataSource | None = None
        self._collector: Collector | None = None
        self._eval_sets: dict[str, list[Prompt]] = {}
        self._pool = EnginePool(
            (),
            concurrency=config.rollout.sglang_server_concurrency,
            timeout_s=config.rollout.rollout_request_timeout_s,
            # While the last engine is replaced: started, and given weights.
            patience_s=config.rollout.rollout_engine_start_timeout_s
            + config.weight_sync.update_weight_timeout_s,
            vocabulary_size=hf.vocabulary_size(hf.load_config(str(config.rollout.hf_checkpoint))),
        )

    async def start(self) -> int | None:
        """Load tokenizer and prompts; return the prompts of an epoch, if there are prompts."""
        config = self._config
        # What is loaded by now stays: without this, full collections take longer than scoring.
        gc.freeze()
        self._tokenizer = hf.load_tokenizer(
            str(config.rollout.hf_checkpoint), config.data.chat_template_path
        )
        self._config = config = with_context_length(config, self._unserved_tokens)
        self._eval_sets = eval_sources(config, self._tokenizer)
        if not reads_prompts(config):
            return None
        self._source = make_source(config, self._tokenizer)
        if generates_rollouts(config):
            self._collector = Collector(config, self._pool, self._tokenizer, self._source)
        return len(self._source)

    async def set_engines(self, addresses: EngineAddresses) -> None:
        self._pool.set_engines(addresses.urls, addresses.router)

    async def generate(self, rollout_id: int, dp_size: int) -> GeneratedBatch:
        """Produce, record and split the groups of a rollout."""
        retries = self._pool.stats().retries
        output = await self._groups(rollout_id)
        record = self._config.observability.save_debug_rollout_data
        if record is not None:
            debug_data.save_groups(record, rollout_id, output.groups)
        metrics = {**batch.batch_metrics(output.groups, self._config), **output.metrics}
        hook = load_hook(
            "custom_rollout_log_function_path", self._config.hooks.custom_rollout_log_function_path
        )
        if hook is not None:
            metrics = hook(rollout_id, output.groups, metrics)
        metrics = numbers(metrics, "--custom-rollout-log-function-path or a rollout function")
        if self._pool.urls:
            metrics["rollout/retried_requests"] = float(self._pool.stats().retries - retries)
        shards = batch.make_batches(output.groups, self._config, rollout_id, dp_size)
        return GeneratedBatch(
            shards=[ray.put(shard) for shard in shards],
            metrics=metrics,
            samples=readable(output.groups),
            num_tokens=sum(len(s.tokens) for group in output.groups for s in group),
        )

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics under ``eval/``, with the weights the engines have now."""
        function = load_hook("eval_function_path", self._config.hooks.eval_function_path)
        if function is not None:
            metrics = await function(rollout_id, self._context())
            metrics = numbers(metrics, "--eval-function-path")
            return {f"eval/{name}": value for name, value in metrics.items()}
        metrics, samples = await evaluate(
            rollout_id, self._eval_sets, self._config, self._pool, self._tokenizer
        )
        hook = load_hook(
            "custom_eval_rollout_log_function_path",
            self._config.hooks.custom_eval_rollout_log_function_path,
        )
        if hook is not None:
            metrics = hook(rollout_id, samples, metrics)
        return numbers(metrics, "--custom-eval-rollout-log-function-path")

    async def save(self, folder: str) -> None:
        """Write the data position and unfinished groups into a checkpoint's folder."""
        state = {
            "source": self._source.state_dict() if self._source is not None else None,
            "collector": self._collector.state_dict() if self._collector is not None else None,
        }
        path = Path(folder) / STATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(msgspec.msgpack.encode(state))
            file.flush()
            os.fsync(file.fileno())

    async def load(self, folder: str) -> None:
        """Resume the position that ``save`` wrote. Raises ``ConfigError`` for a damaged file."""
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            raise FileNotFoundError(f"the checkpoint {folder} has no {STATE_FILE}")
        try:
            state = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            told = checkpoints.damaged(path.parent, path)
            raise ConfigError([Problem("--load", str(path.parent.parent), told)]) from error
        if self._source is not None and state["source"] is not None:
            self._source.load_state_dict(state["source"])
        elif self._source is not None:
            log.warning("%s was trained on recorded rollouts: prompts start from the first", folder)
        if self._collector is not None and state["collector"] is not None:
            self._collector.load_state_dict(state["collector"])

    async def _groups(self, rollout_id: int) -> RolloutOutput:
        debug_path = self._config.observability.load_debug_rollout_data
        if debug_path is not None:
            return RolloutOutput(groups=debug_data.load_groups(debug_path, rollout_id))
        rollout = load_hook("rollout_function_path", self._config.hooks.rollout_function_path)
        if rollout is not None:
            return await rollout(rollout_id, self._context())
        if self._collector is None:
            return await supervised.rollout(rollout_id, self._context())
        return await self._collector.collect(rollout_id)

    def _context(self) -> RolloutContext:
        assert self._source is not None
        return RolloutContext(
            config=self._config,
            engines=self._pool,
            tokenizer=self._tokenizer,
            data_source=self._source,
        )


def numbers(metrics: Any, source: str) -> dict[str, float]:
    """Metrics as the tracker takes them. Raises ``ValueError`` that names the user's function."""
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source} must return metrics as an object of names and numbers ({error})"
        ) from error


def readable(groups: list[Group], limit: int = 4) -> list[dict[str, Any]]:
    """The first sample of a few groups, as a person wants to read them."""
    return [
        {
            "prompt": group[0].prompt.text,
            "response": group[0].response,
            "label": group[0].prompt.label,
            "reward": group[0].reward,
            "status": str(group[0].status),
            "tokens": group[0].response_length,
        }
        for group in groups[:limit]
        if group
    ]


def with_num_rollout(config: MilesConfig, num_prompts: int | None) -> MilesConfig:
    """``--num-rollout``, or what ``--num-epoch`` makes of the data set's size."""
    data = config.data
    if data.num_rollout is not None or num_prompts is None:
        return config
    assert data.num_epoch is not None
    assert data.rollout_batch_size is not None
    num_rollout = max(1, num_prompts * data.num_epoch // data.rollout_batch_size)
    return replace(config, data=replace(data, num_rollout=num_rollout))
