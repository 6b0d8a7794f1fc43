"""Which engine a job starts, and how its holder starts and ends it."""

from miles.config.root import MilesConfig
from miles.ray.rollout.engine_factory import LAUNCHERS, choose_engine


def test_the_default_engine_is_one_that_can_be_started() -> None:
    assert MilesConfig().rollout.rollout_engine == "auto"
    assert choose_engine(MilesConfig()) in LAUNCHERS
