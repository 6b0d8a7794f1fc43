"""What engines release while the trainer has the device."""

import pytest

from miles.config.offload import RolloutLevel
from miles.ray.memory import released_tags


@pytest.mark.parametrize(
    ("level", "tags"),
    [
        (("kv_cache", "weight"), {"cuda_graph", "kv_cache", "weights"}),
        (("kv_cache",), {"cuda_graph", "kv_cache"}),
        (("weight",), {"cuda_graph", "weights"}),
    ],
)
def test_engines_release_what_the_level_says_and_their_graphs(
    level: tuple[RolloutLevel, ...], tags: set[str]
) -> None:
    assert released_tags(level) == tags
