"""The life of a trainer rank through the six methods of the contract, for any backend."""

from typing import Any

from miles.backends.training_utils.checkpoints import read_tracker
from miles.config.root import MilesConfig
from miles.contracts.engine import EngineSet
from miles.contracts.types import TrainBatch
from miles.core import distributed
from miles.ray.train.actor_factory import BACKENDS
from miles.weight_sync.checksums import checksum

Rollouts = list[list[TrainBatch]]


def first_life(config: MilesConfig, engines: EngineSet, rollouts: Rollouts) -> dict[str, Any]:
    """Sync, train, save, sleep, sync asleep, wake, train, save durably; what each method gave."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    seen: dict[str, Any] = {"first": actor.init(config), "versions": [], "stats": []}
    rank = actor.parallel.dp_rank
    seen["versions"].append(actor.update_weights(engines))
    seen["stats"].append(actor.train(0, rollouts[0][rank]))
    actor.save_model(0)
    seen["trained"] = _digests(actor)
    for _ in range(2):
        actor.sleep()
    seen["versions"].append(actor.update_weights(engines))
    seen["in the engines"] = engines.weight_checksums() if rank == 0 else None
    for _ in range(2):
        actor.wake_up()
    seen["woken"] = _digests(actor)
    seen["stats"].append(actor.train(1, rollouts[1][rank]))
    actor.save_model(1, force_sync=True)
    # Rank 0 moves the tracker before it returns; the others may be ahead of it by then.
    distributed.barrier()
    assert config.checkpoint.save is not None
    seen["tracker"] = read_tracker(config.checkpoint.save)
    seen["end"] = _digests(actor)
    actor.shutdown()
    return seen


def second_life(config: MilesConfig, engines: EngineSet, rollouts: Rollouts) -> dict[str, Any]:
    """Resume, sync and go on."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    first = actor.init(config)
    resumed = _digests(actor)
    version = actor.update_weights(engines)
    stats = [actor.train(i, rollouts[i][actor.parallel.dp_rank]) for i in range(first, 3)]
    end = _digests(actor)
    actor.shutdown()
    return {
        "first": first,
        "resumed": resumed,
        "version": version,
        "stats": stats,
        "end": end,
    }


def uninterrupted_life(config: MilesConfig, rollouts: Rollouts) -> dict[str, str]:
    """Nothing but training."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    for rollout_id, shards in enumerate(rollouts):
        actor.train(rollout_id, shards[actor.parallel.dp_rank])
    end = _digests(actor)
    actor.shutdown()
    return end


def first_rollout(config: MilesConfig) -> int:
    """Where a start begins."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    first = actor.init(config)
    actor.shutdown()
    return first


def synced_life(config: MilesConfig, engines: EngineSet, rollouts: Rollouts) -> dict[str, Any]:
    """Sync, train, sync; what the engines hold each time, as rank 0 sees them."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    is_first = distributed.rank() == 0
    actor.update_weights(engines)
    seen: dict[str, Any] = {"before": engines.weight_checksums() if is_first else None}
    actor.train(0, rollouts[0][actor.parallel.dp_rank])
    actor.update_weights(engines)
    seen["after"] = engines.weight_checksums() if is_first else None
    seen["trained"] = _digests(actor)
    actor.shutdown()
    return seen


def streamed_life(config: MilesConfig, rollouts: Rollouts) -> dict[str, Any]:
    """What a sync would send before training and after."""
    actor: Any = BACKENDS.load(config.cluster.train_backend)()
    actor.init(config)
    seen = {"before": _digests(actor)}
    actor.train(0, rollouts[0][actor.parallel.dp_rank])
    seen["trained"] = _digests(actor)
    actor.shutdown()
    return seen


def _digests(actor: Any) -> dict[str, str]:
    return {weight.name: checksum(weight.tensor) for weight in actor.ops.hf_weights()}
