"""Synchronous training: generate, train, save, sync weights, evaluate; again."""

import asyncio
import sys
from collections.abc import Sequence

try:
    from miles.config.errors import ConfigError
    from miles.config.root import MilesConfig
    from miles.core import owned
    from miles.core.console import RunConsole, until_output_closes
    from miles.utils.arguments import parse_args
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {sys.executable} does not have what Miles needs ({error}): run make install, and "
        "then .venv/bin/python train.py"
    )


async def train(config: MilesConfig) -> None:
    from miles.loop import Job  # after the flags are parsed: --help needs neither torch nor Ray

    async with Job.start(config) as job:
        await job.sync_weights()
        await job.evaluate_before_training()
        for rollout_id in job.rollout_ids():
            batch = await job.generate(rollout_id)
            await job.train(rollout_id, batch)
            await job.checkpoint(rollout_id)
            await job.sync_weights()
            await job.evaluate(rollout_id)


def run(config: MilesConfig) -> int:
    from miles.rundir import completed_rollouts

    done = completed_rollouts(config)
    if done is not None:
        RunConsole(done).say(f"nothing left to run: {done} rollouts are done")
        return 0
    from miles.ray.errors import JobError

    try:
        asyncio.run(train(config))
    except (JobError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    owned.interrupt_on_sigterm()
    owned.end_with_owner()
    try:
        return run(parse_args(argv))
    except KeyboardInterrupt:
        print(
            "interrupted: every process of this run has been ended; with --load it goes on from "
            "its last checkpoint, if it saved one (--save, --save-interval)",
            file=sys.stderr,
        )
        if "miles.ray.cluster" in sys.modules:
            sys.modules["miles.ray.cluster"].leave(130)
        return 130


if __name__ == "__main__":
    sys.exit(until_output_closes(main))
