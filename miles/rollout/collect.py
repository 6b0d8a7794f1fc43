"""Fills a batch of groups: over-sampling, filters, aborting the surplus, partial rollouts.

No prompt is lost or answered twice: what a rollout took and did not use goes back to the backlog,
and that is part of what a checkpoint holds.
"""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.engine import Completion, GenerateRequest
from miles.contracts.hooks import (
    DataSource,
    FilterDecision,
    GenerateContext,
    Generator,
    RolloutOutput,
)
from miles.contracts.types import Group, Status
from miles.core import logging
from miles.rollout.backlog import Backlog, Work
from miles.rollout.rewards.score import RewardError, describe, score
from miles.rollout.rewards.table import naming_of
from miles.rollout.steps import (
    MAX_TRIES,
    GenerationError,
    Steps,
    generate_group,
    make_steps,
    sampling_params,
    seeded,
)

log = logging.get(__name__)

ABORT_AGAIN_S = 1.0
"""A request may slip past an abort (it was in a queue); abort again after so long."""
ABORT_TIMEOUT_S = 120.0
"""For aborted groups to come back, tool calls included; then their tokens are given up."""
MAX_DROPS_PER_PROMPT = 50
"""Groups dropped in a row, for each prompt of a batch, before the filter counts as wrong."""
MIN_DROPS = 500


class Engines(Generator, Protocol):
    """What collecting asks of the engine pool."""

    async def abort_all(self) -> None:
        """Ask every engine to stop what it generates now; those requests return with finish reason
        ``abort`` and the tokens they have."""
        ...


class _Gate:
    """Engines that, once closed, answer new requests as aborted: a multi-turn function must not
    start its next turn after its engines were told to stop."""

    def __init__(self, engines: Generator) -> None:
        self._engines = engines
        self.closed = False

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if not self.closed:
            return await self._engines.generate(request)
        nothing = Completion(
            output_ids=(), log_probs=(), text="", finish_reason="abort", weight_version=0
        )
        return [nothing] * request.n


@dataclass
class _Run:
    """One call of ``collect``."""

    rollout_id: int
    gate: _Gate
    num_submissions: int = 0
    tasks: dict["asyncio.Task[None]", Work] = field(
        default_factory=dict["asyncio.Task[None]", Work]
    )
    kept: list[Group] = field(default_factory=list[Group])
    finished: list[Group] = field(default_factory=list[Group])
    """Kept or not, for the hook that sees all."""
    counts: Counter[str] = field(default_factory=Counter[str])
    num_scored: int = 0
    reward_errors: list[Exception] = field(default_factory=list[Exception])
    """One for each sample that counts as --rm-default."""
    failed_rewards: set[str] = field(default_factory=set[str])
    """Which rewards these errors are of, as a user names them."""
    aborts: Counter[int] = field(default_factory=Counter[int])
    """By group: how often something else than this rollout aborted it."""
    dropped_in_row: int = 0


class Collector:
    """Rollouts of ``--rollout-batch-size`` groups, one ``collect`` at a time.

    Up to ``--over-sampling-batch-size`` prompts are submitted at a time; the first groups to pass
    the filter make the batch, the others are aborted. Aborted groups with tokens go on in the next
    rollout under ``--partial-rollout``; of all others the prompt is the first to be submitted.
    Under ``--deterministic-rollout`` nothing races: a whole submission is awaited, the first
    groups in order of prompts are taken, and no tokens are carried over.
    """

    def __init__(
        self, config: MilesConfig, engines: Engines, tokenizer: Any, source: DataSource
    ) -> None:
        assert config.data.rollout_batch_size is not None, "validated when flags are parsed"
        self._config = config
        self._engines = engines
        self._tokenizer = tokenizer
        self._backlog = Backlog(config, source)
        self._steps: Steps = make_steps(config, tokenizer)
        self._target = config.data.rollout_batch_size
        self._params = sampling_params(config, evaluation=False)
        self._state_before: dict[str, Any] | None = None

    async def collect(self, rollout_id: int) -> RolloutOutput:
        """Return a batch of scored groups, in order of ``group_id``.

        Raises ``GenerationError`` when a group cannot be generated, ``ConfigError`` when the
        filter keeps nothing, ``RewardError`` when nothing could be scored; the collector is then
        as it was before the call.
        """
        self._state_before = self._backlog.state_dict()
        run = _Run(rollout_id, _Gate(self._engines))
        complete = False
        try:
            await self._fill(run)
            await self._stop(run)
            self._require_rewards(run)
            complete = True
        finally:
            before, self._state_before = self._state_before, None
            if not complete:
                run.gate.closed = True
                await _cancel(run.tasks)
                self._backlog.load_state_dict(before)
        return self._output(run)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, unused prompts and unfinished groups, as plain values.

        While a rollout is being collected it is the state before it: to resume from there is to
        collect that rollout again.
        """
        return self._backlog.state_dict() if self._state_before is None else self._state_before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ConfigError`` when the state does not fit the data or the flags."""
        self._backlog.load_state_dict(state)

    async def _fill(self, run: _Run) -> None:
        deterministic = self._config.rollout.deterministic_rollout
        until = asyncio.ALL_COMPLETED if deterministic else asyncio.FIRST_COMPLETED
        while len(run.kept) < self._target:
            missing = self._target - len(run.kept) - len(run.tasks)
            while missing > 0:
                num_groups = self._config.rollout.over_sampling_batch_size or missing
                self._submit(run, num_groups)
                missing -= num_groups
            done, _ = await asyncio.wait(run.tasks, return_when=until)
            finished = [(task, run.tasks.pop(task)) for task in done]
            for task, work in sorted(finished, key=lambda item: item[1].group_id):
                task.result()
                self._settle(run, work)

    def _submit(self, run: _Run, num_groups: int) -> None:
        works = self._backlog.take(num_groups)
        run.counts["submitted"] += len(works)
        run.counts["partial_reused"] += sum(bool(work.unfinished) for work in works)
        key = f"{run.rollout_id}:{run.num_submissions}"
        run.num_submissions += 1
        for position, work in enumerate(works):
            admission = None
            if self._config.rollout.deterministic_rollout:
                admission = (key, position, len(works))
            task = asyncio.ensure_future(self._process(run, work, admission))
            run.tasks[task] = work

    async def _process(self, run: _Run, work: Work, admission: tuple[str, int, int] | None) -> None:
        num_samples = self._config.data.n_samples_per_prompt
        context = GenerateContext(
            config=self._config,
            engines=run.gate,
            tokenizer=self._tokenizer,
            params=self._params,
            num_samples=num_samples,
            evaluation=False,
            first_index=work.group_id * num_samples,
            unfinished=work.unfinished,
            admission=admission,
        )
        context = seeded(context, run.rollout_id)
        work.group = await generate_group(self._steps, work.prompt, context)
        if not work.aborted and not run.gate.closed:
            run.num_scored += sum(s.status is not Status.FAILED for s in work.group)
            errors = await score(work.group, self._steps.reward)
            run.reward_errors += errors
            if errors:
                run.failed_rewards.add(naming_of(work.prompt.metadata, self._config))

    def _settle(self, run: _Run, work: Work) -> None:
        """Keep a group, drop it, or give it back."""
        group = work.group
        assert group is not None, "its task has ended without an error"
        if work.aborted:
            run.aborts[work.group_id] += 1
            if run.aborts[work.group_id] >= MAX_TRIES:
                raise GenerationError(
                    f"prompt {work.group_id} ({work.prompt.text[:200]!r}) was aborted "
                    f"{MAX_TRIES} times by something else than this rollout"
                )
            self._backlog.give_back(work)
        elif len(run.kept) >= self._target:
            run.counts["surplus"] += 1
            self._backlog.give_back(work)
        else:
            if self._steps.all_samples_process is not None:
                run.finished.append(group)
            self._filter(run, group)

    def _filter(self, run: _Run, group: Group) -> None:
        decision: FilterDecision | bool = True
        if self._steps.dynamic_filter is not None:
            decision = self._steps.dynamic_filter(group, self._config)
        if isinstance(decision, bool):
            decision = FilterDecision(decision)
        if decision.keep:
            run.kept.append(group)
            run.dropped_in_row = 0
            return
        run.counts[f"dynamic_filter/drop_{decision.reason}"] += 1
        run.dropped_in_row += 1
        if run.dropped_in_row >= max(MIN_DROPS, MAX_DROPS_PER_PROMPT * self._target):
            path = self._config.hooks.dynamic_sampling_filter_path
            remedy = f"it dropped {run.dropped_in_row} groups in a row: {dict(run.counts)}"
            raise ConfigError([Problem("--dynamic-sampling-filter-path", path, remedy)])

    async def _stop(self, run: _Run) -> None:
        """Abort what is still on its way and give it back."""
        run.gate.closed = True
        run.counts["aborted"] += len(run.tasks)
        for task, work in run.tasks.items():
            if work.group is not None:
                task.cancel()  # it is generated, and being scored
        for _ in range(round(ABORT_TIMEOUT_S / ABORT_AGAIN_S)):
            waiting = [task for task in run.tasks if not task.done()]
            if not waiting:
                break
            await self._engines.abort_all()
            await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
        await _cancel(run.tasks)
        for work in run.tasks.values():
            self._backlog.give_back(work)

    def _require_rewards(self, run: _Run) -> None:
        """One response that has no reward counts as --rm-default. When all are so, there is nothing
        to learn from, and the reward itself is broken."""
        errors = run.reward_errors
        if not errors or len(errors) < run.num_scored:
            return
        named = ", ".join(sorted(run.failed_rewards))
        raise RewardError(
            f"none of {run.num_scored} responses got a reward ({named}): {describe(errors[-1])}"
        )

    def _output(self, run: _Run) -> RolloutOutput:
        run.kept.sort(key=lambda group: group[0].group_id)
        if self._steps.sample_filter is not None:
            self._steps.sample_filter(run.kept, self._config)
        if self._steps.all_samples_process is not None:
            self._steps.all_samples_process(run.finished, self._config)
        run.counts["reward_failed"] = len(run.reward_errors)
        metrics = {f"rollout/{name}": float(count) for name, count in run.counts.items()}
        return RolloutOutput(groups=run.kept, metrics=metrics)


async def _cancel(tasks: "Collection[asyncio.Task[None]]") -> None:
    """End tasks and wait for them, not for ever. What they raise is of no interest any more."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=ABORT_AGAIN_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
