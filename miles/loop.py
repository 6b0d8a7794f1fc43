"""``Job``: the verbs that drivers are written with: generate, train, checkpoint, sync, evaluate."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.backends.training_utils import checkpoints
from miles.config.derived import needs_engines
from miles.config.root import MilesConfig
from miles.core.console import RunConsole
from miles.core.tracking import MetricsError, Tracker
from miles.ray import cluster
from miles.ray.errors import JobError, gather
from miles.ray.memory import Memory, Phase, Resident, TakeTurns
from miles.ray.placement import Layout, Placement, plan_layout, require_whole_machines, reserve
from miles.ray.rollout.capacity import require_capacity
from miles.ray.rollout.engine_factory import EngineGroup
from miles.ray.rollout.engines import Engines
from miles.ray.rollout.external_engines import ExternalEngines
from miles.ray.rollout.manager import GeneratedBatch, with_num_rollout
from miles.ray.rollout.router import Router, make_router
from miles.ray.rollout.service import RolloutService
from miles.ray.rollout.supervision import EngineSupervisor
from miles.ray.train.group import TrainGroup
from miles.report import draw_reward, summarize
from miles.rollout.engine_set import EngineAddresses
from miles.rundir import (
    LOGS_FOLDER,
    hold_directories,
    make_tracker,
    with_wandb_run,
    write_samples,
)

STOP_TIMEOUT_S = 30.0
GIB = 2**30


class Job:
    """One run: its processes, and what has been measured of the current rollout."""

    def __init__(self, config: MilesConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.console = RunConsole(config.data.num_rollout or 0)
        self._tracker: Tracker = make_tracker(config, run_dir)
        self._metrics: dict[str, float] = {}
        self._recorded: dict[str, float] = {}
        self._first_rollout_id = 0
        self._rollout_id: int | None = None
        self._resumed = False
        self._placement: Placement | None = None
        self._rollout = RolloutService(config)
        self._engines: Engines | None = None
        self._router: Router | None = None
        self._supervisor: EngineSupervisor | None = None
        self._trainer: TrainGroup | None = None
        self._memory: Memory = Resident()

    @classmethod
    @asynccontextmanager
    async def start(cls, config: MilesConfig) -> AsyncGenerator["Job"]:
        """Bring every process up; on the way out, however that comes, take them all down."""
        config = with_wandb_run(config)
        with hold_directories(config) as run_dir:
            try:
                cluster.start()
                job = cls(config, run_dir)
                try:
                    await job._bring_up()
                    yield job
                    await job._finish()
                finally:
                    if cluster.is_lost():
                        cluster.abandon()
                    else:
                        await job._take_down()
            finally:
                cluster.stop()

    def rollout_ids(self) -> Iterator[int]:
        """The rollouts still to run in this process."""
        assert self.config.data.num_rollout is not None
        last = self.config.data.num_rollout
        limit = self.config.observability.debug_exit_after_rollout
        if limit is not None:
            last = min(last, self._first_rollout_id + limit)
        if self._first_rollout_id >= last:
            self.console.say(f"nothing left to run: {self._first_rollout_id} rollouts are done")
        for rollout_id in range(self._first_rollout_id, last):
            self._metrics, self._recorded = {}, {}
            self._rollout_id = rollout_id
            start = time.perf_counter()
            yield rollout_id
            self._metrics["perf/step_time"] = time.perf_counter() - start
            self._report(rollout_id)

    async def generate(self, rollout_id: int) -> GeneratedBatch:
        """Generate and score a rollout; an engine that dies meanwhile is replaced."""
        dp_size = self._trainer.dp_size if self._trainer is not None else 1
        async with self._phase("rollout", "rollout_time", f"rollout {rollout_id}: generating"):
            batch = await self._watched(self._rollout.generate(rollout_id, dp_size))
        self._metrics.update(batch.metrics)
        self._metrics["rollout/num_tokens"] = float(batch.num_tokens)
        write_samples(self.run_dir, rollout_id, batch.samples)
        return batch

    async def train(self, rollout_id: int, batch: GeneratedBatch) -> None:
        """Take the rollout's optimizer steps."""
        if self._trainer is None:
            return
        async with self._phase("train", "train_time", f"rollout {rollout_id}: training"):
            stats = await self._trainer.train(rollout_id, batch.shards)
        self._metrics.update(stats.metrics)

    async def checkpoint(self, rollout_id: int) -> None:
        """Save when the interval, the sentinel or the end of the run asks for it."""
        options = self.config.checkpoint
        if self._trainer is None or options.save is None:
            return
        sentinel = options.save_trigger_sentinel
        asked = checkpoints.sentinel_requested(sentinel)
        if not (asked or self._save_is_due(rollout_id)):
            return
        # On disk before the checkpoint is: a run that resumes there does not repeat this rollout.
        self._record(rollout_id)
        async with self._phase("train", "save_time", f"rollout {rollout_id}: saving"):
            if asked:
                checkpoints.mark_requested(options.save, rollout_id + 1)
            await self._rollout.save(checkpoints.staging_dir(options.save, rollout_id + 1))
            force_sync = asked or self._is_last(rollout_id)
            await self._trainer.save_model(rollout_id, force_sync=force_sync)
        if asked and sentinel is not None:
            checkpoints.clear_sentinel(sentinel)

    async def sync_weights(self) -> None:
        """Give the engines the trainer's current weights; one that died meanwhile, or dies in
        here, is replaced."""
        if self._trainer is None or self._supervisor is None:
            return

        async def sync() -> None:
            async with self._phase("sync", "update_weights_time", "syncing weights"):
                assert self._engines is not None
                await self._push_weights(self._engines.addresses, self._moment("weight sync"))

        if await self._supervisor.with_all_engines(sync):
            await self._connect()

    async def evaluate_before_training(self) -> None:
        """Evaluate what the run starts from, unless told not to.

        A resumed run does so where the interval says: then the interrupted one may not have come
        to it, and elsewhere an uninterrupted run would not evaluate.
        """
        options, first = self.config.evaluation, self._first_rollout_id
        if options.eval_interval is None:
            return
        if self._resumed:
            due = first % options.eval_interval == 0
        else:
            due = not options.skip_eval_before_train
        if due:
            await self._evaluate(first)

    async def evaluate(self, rollout_id: int) -> None:
        """Evaluate when the interval says so; the step is the number of completed rollouts."""
        interval = self.config.evaluation.eval_interval
        if interval is not None and (rollout_id + 1) % interval == 0:
            # What is known of the rollout survives a failure in here.
            self._record(rollout_id)
            await self._evaluate(rollout_id + 1)

    async def _bring_up(self) -> None:
        config = self.config
        with_engines = needs_engines(config)
        with_trainer = not config.observability.debug_rollout_only
        launches = with_engines and not config.rollout.rollout_external
        layout = plan_layout(config, with_engines=launches, with_trainer=with_trainer)
        self.console.say(f"run directory: {self.run_dir}")
        self.console.say("starting: Ray's workers, engines and trainer load the model")
        with self.console.phase("starting"):
            placement = await self._reserve(layout)
            # All processes import their libraries, which takes seconds, beside each other.
            if with_trainer:
                self._trainer = TrainGroup(config, layout, placement)
            logs = self.run_dir / LOGS_FOLDER
            if launches:
                self._use_engines(EngineGroup(config, layout, placement, logs), logs)
            elif with_engines:
                self._use_engines(ExternalEngines(config), logs)
            await self._start_trainer_and_engines()
            await self._resume_data()

    async def _reserve(self, layout: Layout) -> Placement:
        cluster = self.config.cluster
        placement = await reserve(layout, cluster.placement_timeout_s)
        self._placement = placement
        require_whole_machines(layout, placement, cluster.actor_num_gpus_per_node)
        return placement

    def _use_engines(self, engines: Engines, log_dir: Path) -> None:
        self._engines = engines
        self._router = make_router(self.config, log_dir)
        self._supervisor = EngineSupervisor(
            engines,
            self._router,
            self.config.rollout,
            make_room=self._make_room,
            heal=self._heal,
            connect=self._connect,
        )

    async def _start_trainer_and_engines(self) -> None:
        """The trainer, which needs the number of prompts, first when they share devices: it takes
        its memory before engines do."""
        trainer, offload = self._trainer, self.config.offload
        if not self.config.cluster.colocate:
            await gather(self._start_rollouts_and_trainer(), self._start_engines())
        else:
            await self._start_rollouts_and_trainer()
        engines, moves = self._engines, offload.offload_train or offload.offload_rollout
        # Without engines (supervised, or recorded rollouts) there is nobody to make room for.
        if trainer is not None and engines is not None and moves:
            self._memory = TakeTurns(trainer, engines, self.config)
        if self.config.cluster.colocate:
            await self._memory.make_room_for_engines()
            await self._start_engines()

    async def _start_rollouts_and_trainer(self) -> None:
        joins = [self._trainer.join()] if self._trainer is not None else []
        length, *_ = await gather(self._rollout.start(), *joins)
        self.config = with_num_rollout(self.config, length)
        self.console = RunConsole(self.config.data.num_rollout or 0)
        if self._trainer is not None:
            self._first_rollout_id = await self._trainer.init(self.config)
        elif self.config.data.start_rollout_id is not None:
            self._first_rollout_id = self.config.data.start_rollout_id

    async def _start_engines(self) -> None:
        if self._engines is None:
            return
        if self._router is None:
            await self._engines.start()
        else:
            await gather(self._engines.start(), self._router.start())
        await require_capacity(self.config, self._engines.addresses.urls)
        await self._connect()

    async def _connect(self) -> None:
        """From now on requests go to the engines that there are."""
        assert self._engines is not None
        addresses = self._engines.addresses
        if self._router is not None:
            await self._router.use(addresses.urls)
            addresses = replace(addresses, router=self._router.url)
        await self._rollout.set_engines(addresses)

    async def _resume_data(self) -> None:
        # Trainer rank 0 has said so if this is a fresh start.
        announce = self._trainer is None
        folder = checkpoints.resolve_load(self.config.checkpoint.load, announce=announce)
        if folder is None:
            return
        if checkpoints.is_weights_only(folder):
            self.console.say(f"first start, from the weights in {folder}")
            return
        self._resumed = True
        await self._rollout.load(folder)
        self.console.say(f"resumed from {folder}")
        if self._trainer is None:
            if self.config.data.start_rollout_id is None:
                self._first_rollout_id = checkpoints.read_metadata(folder)["iteration"]
            self.console.say("no trainer: engines generate with the weights of --hf-checkpoint")

    async def _finish(self) -> None:
        """The run is complete: everything durable, the picture drawn."""
        if self._trainer is not None:
            await self._shut_trainer_down(self._trainer)
        try:
            picture = draw_reward(self.run_dir)
            summarize(self.run_dir, self.console)
        except MetricsError as error:
            self.console.say(f"no summary and no reward curve: {error}")
            return
        if picture is not None:
            self.console.say(f"reward curve: {picture}")

    async def _shut_trainer_down(self, trainer: TrainGroup) -> None:
        """Wait for the last save in the background as long as for any other one."""
        minutes = self.config.cluster.distributed_timeout_minutes
        try:
            await asyncio.wait_for(trainer.shutdown(), 60 * minutes)
        except TimeoutError as error:
            raise JobError(
                f"the trainer did not finish its last save within {minutes} min "
                "(--distributed-timeout-minutes)"
            ) from error

    async def _take_down(self) -> None:
        # First, so that it does not complain of engines that end.
        self._rollout.kill()
        if self._engines is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engines.stop(), STOP_TIMEOUT_S)
            self._engines.kill()
        if self._router is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._router.stop(), STOP_TIMEOUT_S)
            self._router.kill()
        if self._trainer is not None:
            self._trainer.kill()
        if self._placement is not None:
            self._placement.remove()
        self._tracker.close()

    async def _evaluate(self, step: int) -> None:
        async with self._phase("rollout", "eval_time", f"evaluating after {step} rollouts"):
            metrics = await self._watched(self._rollout.evaluate(step))
        self._tracker.log(step, metrics)
        self.console.evaluation(step, metrics)

    async def _watched[T](self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._supervisor is None else self._supervisor.watch(work))

    async def _make_room(self) -> None:
        await self._memory.make_room_for_engines()

    async def _heal(self) -> None:
        """After an engine was replaced: it gets the trainer's weights, then serves. The others have
        them, and generate meanwhile."""
        assert self._engines is not None
        newcomers = self._engines.newcomers
        if self._trainer is not None and newcomers.urls:
            async with self._memory.weights_at_hand():
                await self._push_weights(newcomers, self._moment("engine restart"))
        await self._connect()

    def _moment(self, what: str) -> str:
        """For messages: what happens, and when in the run."""
        when = "start" if self._rollout_id is None else f"rollout {self._rollout_id}"
        return f"{what} ({when})"

    async def _push_weights(self, addresses: EngineAddresses, during: str) -> None:
        assert self._trainer is not None
        assert self._engines is not None
        version, seconds = await self._trainer.update_weights(addresses, during=during)
        self._engines.weights_given()
        self._metrics["rollout/weight_version"] = float(version)
        self._metrics.update({f"perf/update_weights/{k}": v for k, v in seconds.items()})

    @asynccontextmanager
    async def _phase(self, turn: Phase, name: str, label: str) -> AsyncGenerator[None]:
        """Whose turn it is on the devices, shown; what is done in it is timed as ``perf/<name>``,
        and apart from that what changing turns takes."""
        with self.console.phase(label):
            async with self._memory.phase(turn):
                start = time.perf_counter()
                yield
                self._add(f"perf/{name}", time.perf_counter() - start)
        for move, seconds in self._memory.take_seconds().items():
            self._add(f"perf/offload/{move}", seconds)

    def _add(self, key: str, seconds: float) -> None:
        self._metrics[key] = self._metrics.get(key, 0.0) + seconds

    def _report(self, rollout_id: int) -> None:
        metrics, seconds = self._metrics, self._metrics["perf/step_time"]
        if "rollout/num_tokens" in metrics:
            metrics["perf/tokens_per_s"] = metrics["rollout/num_tokens"] / seconds
        peaks = self._trainer.take_memory_peaks() if self._trainer is not None else {}
        if self._supervisor is not None:
            metrics["rollout/replaced_engines"] = float(self._supervisor.take_num_replaced())
        metrics.update({f"perf/memory/{k}_peak_gib": v / GIB for k, v in peaks.items()})
        self._record(rollout_id)
        self.console.rollout(rollout_id, metrics)

    def _record(self, rollout_id: int) -> None:
        """Log the metrics of the rollout that have not been logged yet."""
        new = {k: v for k, v in self._metrics.items() if self._recorded.get(k) != v}
        self._tracker.log(rollout_id + 1, new)
        self._recorded |= new

    def _save_is_due(self, rollout_id: int) -> bool:
        interval = self.config.checkpoint.save_interval
        periodic = interval is not None and (rollout_id + 1) % interval == 0
        return periodic or self._is_last(rollout_id)

    def _is_last(self, rollout_id: int) -> bool:
        return rollout_id + 1 == self.config.data.num_rollout
