"""What the engine's tests run on trainer ranks, and the inputs for it.

Jobs return plain values, and tensors as bytes. Importing this module imports no Megatron: the ranks
do that in the actor.
"""

import dataclasses
from pathlib import Path
from typing import Any

from miles.backends.megatron_utils.actor import MegatronTrainRayActor
from miles.backends.megatron_utils.architecture import to_argv
from miles.backends.megatron_utils.bridge import flags_of
from miles.backends.training_utils.packing import build_micro_batches
from miles.config.algorithm import AlgorithmConfig
from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.data import DataConfig
from miles.config.hooks import HooksConfig
from miles.config.offload import OffloadConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.precision import PrecisionConfig
from miles.config.rollout import RolloutConfig
from miles.config.root import MilesConfig
from miles.contracts.trainer import WeightsTag
from miles.contracts.types import LossFn, LossOutput, TrainBatch
from miles.core import device
from miles.core.hf import load_config
from tests.unit.backends.fsdp_utils.jobs import Weights, as_bytes
from tests.unit.backends.megatron_utils import made_hooks

COMMON = (
    *("--max-position-embeddings", "2048", "--seq-length", "64"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--tokenizer-type", "NullTokenizer", "--ckpt-format", "torch_dist"),
    *("--moe-router-load-balancing-type", "none", "--moe-router-dtype", "fp32"),
    *("--moe-token-dispatcher-type", "alltoall"),
    "--use-distributed-optimizer",
)


def make_config(model: Path, *flags: str, **groups: dict[str, Any]) -> MilesConfig:
    """fp32, packed rows of up to 40 tokens, steps of 4 samples; ``groups`` override by group."""
    spec = flags[flags.index("--spec") + 1 :][:2] if "--spec" in flags else None
    architecture = to_argv(flags_of(load_config(str(model)), spec))
    base: dict[str, Any] = {
        "cluster": ClusterConfig(train_backend="megatron", distributed_timeout_minutes=2),
        "rollout": RolloutConfig(hf_checkpoint=str(model), rollout_max_response_len=16),
        "algorithm": AlgorithmConfig(),
        "precision": PrecisionConfig(fp32=True),
        "optimizer": OptimizerConfig(lr=1e-3),
        "checkpoint": CheckpointConfig(),
        "hooks": HooksConfig(),
        "offload": OffloadConfig(),
        "data": DataConfig(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=40,
            rollout_batch_size=3,
            n_samples_per_prompt=2,
            global_batch_size=4,
            num_rollout=4,
        ),
    }
    for group, fields in groups.items():
        base[group] = dataclasses.replace(base[group], **fields)
    return MilesConfig(**base, megatron_argv=(*architecture, *COMMON, *flags))


def start(config: MilesConfig, *, with_ref: bool = False) -> tuple[MegatronTrainRayActor, int]:
    actor = MegatronTrainRayActor()
    return actor, actor.init(config, with_ref=with_ref)


def weights_of(actor: MegatronTrainRayActor) -> Weights:
    return {weight.name: as_bytes(weight.tensor) for weight in actor.ops.hf_weights()}


def train_rollouts(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Train on all of them; ``rollouts`` are shards by rollout and data-parallel rank."""
    actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
    steps: list[Any] = []
    metrics: list[Any] = []
    for rollout_id, shards in enumerate(rollouts):
        stats = actor.train(rollout_id, shards[actor.parallel.dp_rank])
        steps += stats.steps
        metrics.append({k: v for k, v in stats.metrics.items() if k.startswith("train/")})
    weights = weights_of(actor)
    parallel = dataclasses.replace(actor.parallel, dp_group=None)
    actor.shutdown()
    return {"steps": steps, "metrics": metrics, "weights": weights, "parallel": parallel}


def log_probs_of(
    config: MilesConfig, rollouts: list[list[TrainBatch]], weights: WeightsTag = "actor"
) -> dict[int, list[float]]:
    """Log-probs by sample index."""
    actor, _ = start(config, with_ref=weights == "ref")
    shard = rollouts[0][actor.parallel.dp_rank]
    steps = build_micro_batches(
        shard, packed=config.data.use_dynamic_batch_size, device=device.current_device()
    )
    batches = [batch for step in steps for batch in step]
    found: dict[int, list[float]] = {}
    for batch, log_probs in zip(
        batches, actor.ops.log_probs(batches, weights=weights), strict=True
    ):
        for row, position in enumerate(batch.sample_positions):
            chosen = log_probs[batch.sequence_R == row]
            found[int(shard.sample_indices[position])] = chosen.tolist()
    actor.shutdown()
    return found


def steps_around_a_bad_one(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """A good step, one whose gradient is not finite, and a good one; what each left."""
    actor, _ = start(config)
    ops = actor.ops
    shard = rollouts[0][actor.parallel.dp_rank]
    batches = build_micro_batches(shard, packed=True, device=device.current_device())[0]

    def loss(factor: float) -> LossFn:
        return lambda batch, stats: LossOutput(loss=factor * stats.log_probs_R.sum(), sums={})

    seen: list[Any] = []
    for factor in (1e-3, float("inf"), 1e-3):
        stats = ops.optimizer_step(batches, loss(factor))
        state = {
            name: as_bytes(tensor) for name, tensor in ops.optimizer.resident_tensors().items()
        }
        counts = [g.get("step") for part in ops.optimizer.parts() for g in part.param_groups]
        seen.append({"stats": stats, "weights": weights_of(actor), "state": (state, counts)})
    actor.shutdown()
    return {"seen": seen}


def train_with_naps(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """Train, sleeping twice over after each rollout; report what was freed meanwhile."""
    actor, _ = start(config, with_ref=config.algorithm.use_kl_loss)
    steps: list[Any] = []
    held: set[int] = set()
    cached: list[int] = []
    same: list[bool] = []
    refused = 0
    for rollout_id, shards in enumerate(rollouts):
        shard = shards[actor.parallel.dp_rank]
        steps += actor.train(rollout_id, shard).steps
        awake = weights_of(actor)
        state = {**actor.ops.store.tensors(), **actor.ops._gradients()}
        cached.append(num_cached_embeddings())
        for _ in range(2):
            actor.sleep()
        held |= {tensor.untyped_storage().nbytes() for tensor in state.values()}
        cached.append(num_cached_embeddings())
        same.append(weights_of(actor) == awake)
        try:
            actor.train(rollout_id, shard)
        except RuntimeError:
            refused += 1
        for _ in range(2):
            actor.wake_up()
        same.append(weights_of(actor) == awake)
    weights = weights_of(actor)
    actor.shutdown()
    found = {"held": held, "refused": refused, "same": same, "cached": cached}
    return {"steps": steps, "weights": weights, **found}


def num_cached_embeddings() -> int:
    """Of sequence lengths, by Megatron."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return RotaryEmbedding.forward.cache_info().currsize


def held_asleep(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """The optimizer's main parameters and moments: elements of each, whether it is in host memory,
    and how many bytes are left of it while the trainer sleeps; the weights around that."""
    actor, _ = start(config)
    actor.train(0, rollouts[0][actor.parallel.dp_rank])
    optimizer = actor.ops.optimizer
    on_device = optimizer.resident_tensors().keys()
    # What has no kind behind its number is the model's own.
    states = {n: t for n, t in optimizer.state_tensors().items() if n.count(".") == 2}
    before = weights_of(actor)
    actor.sleep()
    found = [
        (tensor.numel(), name not in on_device, tensor.untyped_storage().nbytes())
        for name, tensor in states.items()
    ]
    asleep = weights_of(actor)
    actor.wake_up()
    awake = weights_of(actor)
    actor.shutdown()
    return {"states": found, "weights": [before, asleep, awake]}


def weights_at_start(config: MilesConfig) -> Weights:
    """What the engines would get before the first step."""
    actor, _ = start(config)
    weights = weights_of(actor)
    actor.shutdown()
    return weights


def train_with_hooks(config: MilesConfig, rollouts: list[list[TrainBatch]]) -> dict[str, Any]:
    """What the hooks of this process saw in a run, and its weights."""
    made_hooks.seen.clear()
    result = train_rollouts(config, rollouts)
    return {"seen": list(made_hooks.seen), "weights": result["weights"]}


def dtypes_of(config: MilesConfig) -> dict[str, Any]:
    """Of this rank's parameters by global name, and of the optimizer's main copies and moments."""
    from miles.backends.megatron_utils.shards import local_tensors

    actor, _ = start(config)
    found = {
        "parameters": {n: str(t.dtype) for n, t in local_tensors(actor.ops.model.chunks).items()},
        "optimizer": [str(t.dtype) for t in actor.ops.optimizer.resident_tensors().values()],
    }
    actor.shutdown()
    return found


def train_with_updates_between(
    config: MilesConfig, rollouts: list[list[TrainBatch]]
) -> dict[str, Any]:
    """Train, and sleep after each rollout, every second time in two stages with the weights sent
    between them; how many bytes of the parameters were kept on the host meanwhile."""
    from miles.backends.megatron_utils.shards import local_tensors

    actor, _ = start(config)
    steps: list[Any] = []
    kept: list[int] = []
    for rollout_id, shards in enumerate(rollouts):
        steps += actor.train(rollout_id, shards[actor.parallel.dp_rank]).steps
        awake = weights_of(actor)
        if rollout_id % 2:
            actor.sleep(keep_weights=True)
            assert weights_of(actor) == awake
        actor.sleep()
        names = local_tensors(actor.ops.model.chunks)
        saved = [p for parts in actor.ops.store._saved for p in parts if p.key in names]
        kept.append(sum(part.num_bytes for part in saved))
        assert {t.untyped_storage().nbytes() for t in names.values()} == {0}
        actor.wake_up()
        assert weights_of(actor) == awake
    parameters = kept[0]
    weights = weights_of(actor)
    actor.shutdown()
    return {"steps": steps, "weights": weights, "kept": kept, "parameters": parameters}


def weights_around_a_nap(config: MilesConfig) -> list[Weights]:
    """Before and after a sleep that comes before the first step."""
    actor, _ = start(config)
    before = weights_of(actor)
    actor.sleep(keep_weights=True)
    actor.sleep()
    actor.wake_up()
    found = [before, weights_of(actor)]
    actor.shutdown()
    return found


def states_around_a_load(config: MilesConfig, step: Path) -> list[dict[str, int]]:
    """Where the optimizer's tensors begin before a checkpoint is read into it, and after that."""
    actor, _ = start(config)
    found: list[dict[str, int]] = []
    for _ in range(2):
        tensors = actor.ops.optimizer.state_tensors()
        found.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        actor._checkpointer.load(step, actor._state(optimizer=True))
    actor.shutdown()
    return found


def wake_after_other_parameters(config: MilesConfig) -> str:
    """What waking says when the parameters that it makes are not those that it noted."""
    actor, _ = start(config)
    actor.sleep(keep_weights=True)
    name, parameter = next(iter(actor.ops._mastered().items()))
    actor.ops._rebuilt._digests[name] = actor.ops._rebuilt._digests[name][::-1]
    actor.sleep()
    assert parameter.untyped_storage().nbytes() == 0
    try:
        actor.wake_up()
    except RuntimeError as error:
        return f"{name}: {error}"
    finally:
        actor.shutdown()
    return ""
