"""Groups of engines as a job starts them, on a Ray cluster that is there."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from miles.config.root import MilesConfig
from miles.ray.placement import Placement, plan_layout, reserve
from miles.ray.rollout.engine_factory import EngineGroup


def _as_it_is(placement: Placement) -> Placement:
    return placement


@asynccontextmanager
async def started(
    config: MilesConfig, log_dir: Path, seen_as: Callable[[Placement], Placement] = _as_it_is
) -> AsyncGenerator[EngineGroup]:
    """Engines that serve; ``seen_as`` tells them another placement than there is."""
    layout = plan_layout(config, with_engines=True, with_trainer=False)
    placement = await reserve(layout, 60)
    engines = EngineGroup(config, layout, seen_as(placement), log_dir)
    try:
        await engines.start()
        yield engines
    finally:
        await engines.stop()
        engines.kill()
        placement.remove()
