"""Training on Megatron's ranks with the examples of docs/customization.md, which are a module in
``folder``; what they write lands there."""

import sys
from collections.abc import Generator
from contextlib import chdir, contextmanager
from pathlib import Path

from torch import Tensor

from miles.config.root import MilesConfig
from miles.contracts.types import TrainBatch
from tests.unit.backends.fsdp_utils.jobs import Weights
from tests.unit.backends.megatron_utils.engine_jobs import start, weights_of


@contextmanager
def _examples(folder: Path) -> Generator[None]:
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))


def weights_by_rollout(
    folder: Path, config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> list[Weights]:
    """Those before each rollout, and those at the end."""
    with _examples(folder):
        actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
        found = [weights_of(actor)]
        for rollout_id, shards in enumerate(rollouts):
            actor.train(rollout_id, shards[actor.parallel.dp_rank])
            found.append(weights_of(actor))
        actor.shutdown()
        return found


def router_gradients(
    folder: Path, config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> list[Tensor]:
    """Of the last step that was taken, layer by layer; the layout splits no router."""
    with _examples(folder):
        actor, _ = start(config)
        for rollout_id, shards in enumerate(rollouts):
            actor.train(rollout_id, shards[actor.parallel.dp_rank])
        (chunk,) = actor.ops.model.chunks
        found = [
            parameter.main_grad.clone()
            for name, parameter in chunk.named_parameters()
            if name.endswith("router.weight")
        ]
        actor.shutdown()
        return found
